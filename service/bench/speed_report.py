"""What `adaptree bench speed` does around the measurement: load, show progress, print the tables, write the file."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from drafters.registry import NoDrafter
from service.assembly import Assembly, assemble
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.peers import TransformersPeer
from service.bench.prompts import PromptSet, read_prompts, refuse_too_long
from service.bench.speed import (
    PLAIN,
    SPECULATIVE,
    Contestant,
    EngineContestant,
    Measure,
    SpeedRow,
    measure_set,
    summary_of,
    warm_up,
)
from service.config import ServiceConfig
from service.engine.budget import FixedBudget
from service.logging import counting


def run_speed(
    config: ServiceConfig,
    files: Sequence[Path],
    measures: Sequence[Measure],
    *,
    limit: int | None,
    peers: Sequence[str],
    out: Path | None,
) -> bool:
    """Measure all files and report; whether plain and speculative text were the same."""
    refuse_unwritable(out)
    assembly = assemble(config)
    sets = read_sets(assembly, files, limit, measures[0].max_tokens)
    rows = _measure_all(sets, contestants_of(assembly, peers), measures)
    summary = summary_of(rows)
    Console().print(_table(rows, summary))
    write_report(out, conditions_of(assembly), [row.as_json() for row in rows], summary)
    return summary["mismatched_tokens"] == 0


def read_sets(assembly: Assembly, files: Sequence[Path], limit: int | None, max_tokens: int) -> list[PromptSet]:
    """The prompts of all files. Raises StartupError where one leaves no room for its answer."""
    sets = [read_prompts(file, assembly.tokenizer, limit=limit) for file in files]
    for file, prompts in zip(files, sets, strict=True):
        refuse_too_long(prompts.prompts, max_tokens, assembly.limits.max_model_len, f"prompt file {file}")
    return sets


def first_prompts(prompts: PromptSet, count: int) -> PromptSet:
    """The set's first prompts."""
    return replace(prompts, prompts=prompts.prompts[:count])


def contestants_of(assembly: Assembly, peers: Sequence[str]) -> list[Contestant]:
    """Plain decoding, the configured speculation, and peers, all on the same weights."""
    ours = [plain_contestant(assembly), EngineContestant(SPECULATIVE, assembly.engine())]
    others = {TransformersPeer.name: TransformersPeer}
    return [*ours, *(others[name](assembly) for name in peers)]


def plain_contestant(assembly: Assembly) -> EngineContestant:
    return EngineContestant(PLAIN, assembly.engine(drafter=NoDrafter(), policy=FixedBudget(0)))


def _measure_all(
    sets: Sequence[PromptSet], contestants: Sequence[Contestant], measures: Sequence[Measure]
) -> list[SpeedRow]:
    warm_up(contestants, sets[0].prompts[0], measures[0])
    with counting() as progress:
        task = progress.add_task("", total=len(measures) * sum(len(prompts.prompts) for prompts in sets))
        rows = []
        for measure in measures:
            for prompts in sets:
                progress.update(task, description=f"{prompts.name}, T = {measure.temperature:g}")
                rows.append(measure_set(prompts, contestants, measure, lambda done: progress.advance(task, done)))
        return rows


def _table(rows: Sequence[SpeedRow], summary: dict[str, Any]) -> Table:
    peers = list(rows[0].peers)
    titles = ["plain", "speculative", "speedup", "plain, decode", "speculative, decode", "speedup, decode"]
    ratios = [title for name in peers for title in (name, f"plain / {name}", f"speculative / {name}")]
    table = Table("set", "T", "tokens", *titles, "tau", "drafting", "mismatched", *ratios)
    for means in summary["by_temperature"]:
        mine = [row for row in rows if row.temperature == means["temperature"]]
        for row in mine:
            cells = [*_speeds(row), *_quality(row), *_ratios(row, peers)]
            table.add_row(row.set, f"{row.temperature:g}", f"{row.tokens:,}", *cells, end_section=row is mine[-1])
        table.add_row(*_mean_cells(means), end_section=True)
    table.caption = (
        "speeds in tokens per second, prompts included; decode: without the steps that read prompts; "
        "mean: over sets, that of the speedup geometric"
    )
    return table


def _mean_cells(means: dict[str, Any]) -> list[str]:
    quality = [f"{means['tau']:.2f}", f"{100 * means['draft_share']:.1f} %", str(means["mismatched_tokens"])]
    tokens = f"{means['tokens']:,}"
    return ["mean", f"{means['temperature']:g}", tokens, "", "", f"{means['speedup']:.2f}", "", "", "", *quality]


def _speeds(row: SpeedRow) -> list[str]:
    return [
        f"{row.plain_tokens_per_second:.1f}",
        f"{row.speculative_tokens_per_second:.1f}",
        f"{row.speedup:.2f}",
        f"{row.plain_decode_tokens_per_second:.1f}",
        f"{row.speculative_decode_tokens_per_second:.1f}",
        f"{row.decode_speedup:.2f}",
    ]


def _quality(row: SpeedRow) -> list[str]:
    return [f"{row.tau:.2f}", f"{100 * row.draft_share:.1f} %", str(row.mismatched_tokens)]


def _ratios(row: SpeedRow, peers: Sequence[str]) -> list[str]:
    speeds = [(row.peers[name], row.plain_tokens_per_second, row.speculative_tokens_per_second) for name in peers]
    return [
        cell for peer, plain, ours in speeds for cell in (f"{peer:.1f}", f"{plain / peer:.2f}", f"{ours / peer:.2f}")
    ]
