"""Whether what the budget counts with comes true: seconds of a verify, and survival of drafted nodes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.table import Table

from service.assembly import Assembly
from service.bench.commands import Out, Seed, Temperature, numbers
from service.bench.driver import ClosedLoop, Run, generate
from service.bench.experiment import (
    Measure,
    conclude,
    cost_errors,
    counted,
    percentile,
    prepare,
    read_sets,
    requests_from,
)
from service.bench.shift_play import Stream, shifted
from service.config import LoadedConfig
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest
from service.engine.stats import StepStats
from service.errors import StartupError

_ROUNDS = 2
"""Queries of each client in a leg: after the first round prompts are read beside answers under way."""


@dataclass(frozen=True, slots=True)
class Leg:
    """A stretch over which neither traffic nor concurrency changes."""

    phase: int
    concurrency: int
    requests: tuple[GenerationRequest, ...]


@dataclass(frozen=True, slots=True)
class PlayedLeg:
    """A leg and what serving it reported."""

    leg: Leg
    run: Run


def legs_of(stream: Stream, concurrency: Sequence[int], measure: Measure) -> list[Leg]:
    """The whole stream. Each phase begins the cycle of concurrencies anew; its last leg may be shorter."""
    prompts = [prompt for phase in stream.phases for prompt in phase.prompts]
    requests = [_ending_by_itself(request) for request in _requests(prompts, measure)]
    legs: list[Leg] = []
    begin = 0
    for number, phase in enumerate(stream.phases):
        end, clients = begin + len(phase.prompts), cycle(concurrency)
        while begin < end:
            count = next(clients)
            behind = min(end, begin + _ROUNDS * count)
            legs.append(Leg(number, count, tuple(requests[begin:behind])))
            begin = behind
    return legs


def play(engine: Engine, legs: Sequence[Leg], advance: Callable[[int], None] = lambda queries: None) -> list[PlayedLeg]:
    """Serve all legs, one after the other. `advance` hears of queries as they are done."""
    played = []
    for leg in legs:
        played.append(PlayedLeg(leg, generate(engine, leg.requests, ClosedLoop(leg.concurrency))))
        advance(len(leg.requests))
    return played


def _requests(prompts: Sequence[Sequence[int]], measure: Measure) -> list[GenerationRequest]:
    return requests_from(prompts, 0, replace(measure, concurrency=len(prompts)))


def _ending_by_itself(request: GenerationRequest) -> GenerationRequest:
    """What follows an end is nobody's traffic."""
    return replace(request, sampling=replace(request.sampling, ignore_eos=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostError:
    """|predicted / measured - 1| of the seconds of a verify."""

    steps: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalError:
    """A reading of survival's calibration error, and how many nodes its phase had verified by then."""

    nodes: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LegRow:
    """One leg: a window of the run's course."""

    leg: int
    phase: str
    concurrency: int
    queries: int
    tokens_per_second: float
    nodes: int  # verified in this leg
    cost_error: CostError | None
    survival: SurvivalError | None  # the last reading by its end; None before the phase's first one


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSummary:
    """The whole run."""

    cost_error: CostError | None
    cost_error_by_concurrency: dict[int, CostError | None]
    cost_error_decoding: CostError | None  # of the steps that read no prompt
    cost_error_reading: CostError | None  # of those that did
    survival_before: SurvivalError | None  # once enough nodes were verified; None where they never were
    survival_after: SurvivalError | None  # likewise, counted from the change


def rows_of(played: Sequence[PlayedLeg], stream: Stream) -> list[LegRow]:
    """The run's course."""
    return [
        LegRow(
            leg=number,
            phase=stream.phases[mine.leg.phase].name,
            concurrency=mine.leg.concurrency,
            queries=len(mine.leg.requests),
            tokens_per_second=mine.run.num_tokens / mine.run.seconds,
            nodes=sum(step.stats.drafted_nodes for step in mine.run.steps),
            cost_error=cost_error([step.stats for step in mine.run.steps]),
            survival=last_reading(_phase(played[: number + 1], mine.leg.phase)),
        )
        for number, mine in enumerate(played)
    ]


def summary_of(played: Sequence[PlayedLeg], nodes: int) -> CalibrationSummary:
    """The whole run; survival is judged once a phase has verified so many nodes."""
    steps = _steps(played)
    clients = dict.fromkeys(mine.leg.concurrency for mine in played)
    return CalibrationSummary(
        cost_error=cost_error(steps),
        cost_error_by_concurrency={
            count: cost_error(_steps([mine for mine in played if mine.leg.concurrency == count])) for count in clients
        },
        cost_error_decoding=cost_error([step for step in steps if not step.prompt_tokens]),
        cost_error_reading=cost_error([step for step in steps if step.prompt_tokens]),
        survival_before=first_reading_from(_phase(played, 0), nodes),
        survival_after=first_reading_from(_phase(played, 1), nodes),
    )


def cost_error(steps: Sequence[StepStats]) -> CostError | None:
    """Of the steps whose seconds had been predicted; None where there are none."""
    errors = cost_errors(steps)
    if not errors:
        return None
    return CostError(steps=len(errors), median=median(errors), p90=percentile(errors, 90))


def last_reading(steps: Sequence[StepStats]) -> SurvivalError | None:
    """The latest one in these steps."""
    found = readings(steps)
    return found[-1] if found else None


def first_reading_from(steps: Sequence[StepStats], nodes: int) -> SurvivalError | None:
    """The first one after so many nodes."""
    return next((reading for reading in readings(steps) if reading.nodes >= nodes), None)


def readings(steps: Sequence[StepStats]) -> list[SurvivalError]:
    """All readings, each with the nodes verified up to it."""
    found: list[SurvivalError] = []
    nodes = 0
    for step in steps:
        nodes += step.drafted_nodes
        if step.survival_error is not None:
            found.append(SurvivalError(nodes=nodes, error=step.survival_error))
    return found


def _phase(played: Sequence[PlayedLeg], phase: int) -> list[StepStats]:
    return _steps([mine for mine in played if mine.leg.phase == phase])


def _steps(played: Sequence[PlayedLeg]) -> list[StepStats]:
    return [step.stats for mine in played for step in mine.run.steps]


_WARM_UP_TOKENS = 16
_ERRORS = ("error", "p90")


def run(
    loaded: LoadedConfig,
    before: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Prompts of the first half. Give it again to mix several files.")
    ],
    after: Annotated[list[Path], typer.Option(metavar="FILE", help="Prompts of the second half, likewise.")],
    queries: Annotated[int, typer.Option(min=2, help="Queries in all.")] = 240,
    concurrency: Annotated[
        str, typer.Option(metavar="N,...", help="Queries in flight, changing in this cycle.")
    ] = "1,2,4,8",
    nodes: Annotated[
        int, typer.Option(min=1, help="Verified nodes in each half after which survival is judged.")
    ] = 5000,
    temperature: Temperature = 0.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 64,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Whether what the budget counts with comes true: seconds of a verify, and survival of drafted nodes.

    Real prompts with changing concurrency, of another kind from the middle on, through the engine as it is served.
    Reports how far the cost table's seconds were off (an error of 10 % in the median is good), and the calibration
    error of survival (0.03 is good) once so many nodes were verified before the change, and again after it.
    """
    measure = Measure(temperature, max_tokens, 1, seed)
    counts = numbers(concurrency)
    assembly = prepare(loaded.config, out)
    if assembly.costs is None:
        raise StartupError("nothing is predicted without measured costs: set budget_policy to cost")
    first, second = (read_sets(assembly, files, None, max_tokens) for files in (before, after))
    stream = shifted(first, second, queries, seed)
    played = _measured(assembly, legs_of(stream, counts, measure), max(counts))
    rows, summary = rows_of(played, stream), summary_of(played, nodes)
    tables = (course_of(rows), costs_of(summary), survival_of(summary, nodes))
    return conclude(assembly, out, rows, asdict(summary), *tables)


def _measured(assembly: Assembly, legs: Sequence[Leg], most: int) -> list[PlayedLeg]:
    limits = replace(assembly.limits, max_sequences=max(assembly.limits.max_sequences, most))
    play(assembly.engine(limits=limits), [_short(legs[0])])
    engine = assembly.engine(limits=limits)
    with counted(sum(len(leg.requests) for leg in legs), "queries") as advance:
        return play(engine, legs, advance)


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
