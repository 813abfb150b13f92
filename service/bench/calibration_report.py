"""What `adaptree bench calibration` does around the measurement: load, show progress, print the tables, write."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from service.assembly import Assembly, assemble
from service.bench.calibration import Leg, PlayedLeg, legs_of, play
from service.bench.calibration_figures import (
    CalibrationSummary,
    CostError,
    LegRow,
    SurvivalError,
    rows_of,
    summary_of,
)
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.shift_stream import shifted
from service.bench.speed import Measure
from service.bench.speed_report import read_sets
from service.config import ServiceConfig
from service.errors import StartupError
from service.logging import counting

_WARM_UP_TOKENS = 16
_ERRORS = ("error", "p90")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which prompts are streamed, how many at a time, and after how many nodes survival is judged."""

    before: tuple[Path, ...]
    after: tuple[Path, ...]
    queries: int
    concurrency: tuple[int, ...]
    nodes: int


def run_calibration(config: ServiceConfig, plan: Plan, measure: Measure, *, out: Path | None) -> None:
    """Serve the stream and report."""
    refuse_unwritable(out)
    assembly = assemble(config)
    if assembly.costs is None:
        raise StartupError("nothing is predicted without measured costs: set budget_policy to cost")
    before, after = (read_sets(assembly, files, None, measure.max_tokens) for files in (plan.before, plan.after))
    stream = shifted(before, after, plan.queries, measure.seed)
    played = _measured(assembly, legs_of(stream, plan.concurrency, measure), max(plan.concurrency))
    rows, summary = rows_of(played, stream), summary_of(played, plan.nodes)
    Console().print(course_of(rows), costs_of(summary), survival_of(summary, plan.nodes))
    write_report(out, conditions_of(assembly), [row.as_json() for row in rows], summary.as_json())


def _measured(assembly: Assembly, legs: Sequence[Leg], most: int) -> list[PlayedLeg]:
    limits = replace(assembly.limits, max_sequences=max(assembly.limits.max_sequences, most))
    play(assembly.engine(limits=limits), [_short(legs[0])])
    engine = assembly.engine(limits=limits)
    with counting() as progress:
        task = progress.add_task("queries", total=sum(len(leg.requests) for leg in legs))
        return play(engine, legs, lambda done: progress.advance(task, done))


def _short(leg: Leg) -> Leg:
    """A few tokens that nobody measures: first calls allocate and choose code paths."""
    requests = [
        replace(request, sampling=replace(request.sampling, max_tokens=_WARM_UP_TOKENS)) for request in leg.requests
    ]
    return replace(leg, requests=tuple(requests))


def course_of(rows: Sequence[LegRow]) -> Table:
    """One line per leg."""
    table = Table("prompts", "concurrency", "queries", "tokens/s", "nodes", *_ERRORS, "so far", "ECE")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            row.phase,
            str(row.concurrency),
            str(row.queries),
            f"{row.tokens_per_second:.1f}",
            str(row.nodes),
            *_cost_cells(row.cost_error),
            *_survival_cells(row.survival),
            end_section=following is None or following.phase != row.phase,
        )
    table.caption = "error: as below; so far: nodes verified with prompts of this kind at the last reading of the ECE"
    return table


def costs_of(summary: CalibrationSummary) -> Table:
    """How far the seconds of a verify were off."""
    table = Table("seconds of a verify", "steps", *_ERRORS)
    clients = {f"concurrency {count}": error for count, error in summary.cost_error_by_concurrency.items()}
    kinds = {"decoding only": summary.cost_error_decoding, "reading prompts": summary.cost_error_reading}
    for title, error in {"all": summary.cost_error, **clients, **kinds}.items():
        table.add_row(title, "" if error is None else str(error.steps), *_cost_cells(error))
    table.caption = "error: |predicted / measured - 1| of each step, its median and 90th percentile"
    return table


def survival_of(summary: CalibrationSummary, nodes: int) -> Table:
    """How far survival was off, once enough nodes were verified."""
    table = Table("survival of drafted nodes", "nodes verified", "ECE")
    table.add_row("before the change", *_survival_cells(summary.survival_before))
    table.add_row("after it", *_survival_cells(summary.survival_after))
    table.caption = f"the first reading after {nodes} nodes, counted anew from the change; empty: there were fewer"
    return table


def _cost_cells(error: CostError | None) -> tuple[str, str]:
    return ("", "") if error is None else (f"{100 * error.median:.1f} %", f"{100 * error.p90:.1f} %")


def _survival_cells(reading: SurvivalError | None) -> tuple[str, str]:
    return ("", "") if reading is None else (str(reading.nodes), f"{reading.error:.4f}")
