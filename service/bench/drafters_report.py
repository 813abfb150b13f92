"""What `adaptree bench drafters` does around the measurement: load, show progress, print the table, write the file."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from service.assembly import Assembly, assemble
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.drafters_figures import (
    WINDOW_STEPS,
    PlayerSummary,
    Stretch,
    priced_steps,
    rows_of,
    summary_of,
)
from service.bench.drafters_turns import engines_of, take_turns, warm_up
from service.bench.generate import Run
from service.bench.shift_play import mixed
from service.bench.speed import PLAIN, Measure
from service.bench.speed_report import read_sets
from service.config import ServiceConfig
from service.logging import counting


def run_drafters(
    config: ServiceConfig, files: Sequence[Path], measure: Measure, *, queries: int, out: Path | None
) -> bool:
    """Let every player answer the same texts and report; whether all texts were the same."""
    refuse_unwritable(out)
    assembly = assemble(config)
    sets = read_sets(assembly, files, None, measure.max_tokens)
    runs = _measured(assembly, mixed(sets, queries, random.Random(measure.seed)), measure)
    summaries = {name: summary_of(mine, runs[PLAIN]) for name, mine in runs.items()}
    Console().print(table_of(summaries))
    mismatched = sum(summary.mismatched_tokens for summary in summaries.values())
    rows = [row.as_json() for name, mine in runs.items() for row in rows_of(name, priced_steps(mine, runs[PLAIN]))]
    players = {name: summary.as_json() for name, summary in summaries.items()}
    write_report(out, conditions_of(assembly), rows, {"mismatched_tokens": mismatched, "players": players})
    return mismatched == 0


def _measured(assembly: Assembly, prompts: Sequence[Sequence[int]], measure: Measure) -> dict[str, list[Run]]:
    limits = replace(assembly.limits, max_sequences=max(assembly.limits.max_sequences, measure.concurrency))
    # On other engines than those measured: what a budget makes of its first steps is part of the result.
    warm_up(engines_of(assembly, limits, measure.seed), prompts[0], measure)
    engines = engines_of(assembly, limits, measure.seed)
    with counting() as progress:
        task = progress.add_task("texts", total=len(prompts))
        return take_turns(engines, prompts, measure, lambda done: progress.advance(task, done))


def table_of(summaries: Mapping[str, PlayerSummary]) -> Table:
    """One line per player."""
    first, later = f"first {WINDOW_STEPS}", f"after {WINDOW_STEPS}"
    titles = ["tokens/s", "over plain", first, later, "tau", "nodes", "stopped", "mismatched"]
    table = Table("drafter", "steps", *titles)
    for name, summary in summaries.items():
        table.add_row(name, str(summary.whole.steps), *_cells(summary), str(summary.mismatched_tokens))
    table.caption = (
        "steps that read prompts are left out; over plain: plain decoding's seconds for the same tokens by these, in "
        f"all steps, the first {WINDOW_STEPS} and those after them, with what holds 95 % of resampled texts; nodes: "
        "per step; stopped: steps until the budget no longer asked the drafter (it asks again for 1 % of the time)"
    )
    return table


def _cells(summary: PlayerSummary) -> list[str]:
    whole, stopped = summary.whole, summary.stopped_after_steps
    return [
        f"{whole.tokens_per_second:.1f}",
        f"{whole.over_plain:.3f}",
        f"{summary.first.over_plain:.3f}",
        _later(summary.later, summary.later_over_plain_interval),
        f"{whole.tau:.2f}",
        f"{whole.nodes_per_step:.1f}",
        "" if stopped is None else str(stopped),
    ]


def _later(stretch: Stretch | None, interval: tuple[float, float] | None) -> str:
    if stretch is None or interval is None:
        return ""
    return f"{stretch.over_plain:.3f}\n[{interval[0]:.3f}, {interval[1]:.3f}]"
