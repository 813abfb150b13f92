"""`adaptree bench speed`: plain against speculative decoding of the same prompts, in one process and in turn."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from rich.console import Console
from rich.table import Table

from service.assembly import Assembly, assemble
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.driver import Run
from service.bench.experiment import (
    PLAIN,
    SPECULATIVE,
    Contestant,
    EngineContestant,
    Measure,
    accepted_by_source,
    decode_tokens_per_second,
    draft_share,
    mismatches,
    plain_contestant,
    read_sets,
    take_turns,
    tau,
    tokens_per_second,
    warm_up,
)
from service.bench.peers import TransformersPeer
from service.bench.report import Column
from service.config import ServiceConfig
from service.logging import counting
from service.prompts import PromptSet


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """The result for one prompt set. Tokens per second include reading the prompts, except in the `decode` columns."""

    set: str
    temperature: float
    concurrency: int
    prompts: int
    tokens: int
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    speedup: float
    plain_decode_tokens_per_second: float
    speculative_decode_tokens_per_second: float
    decode_speedup: float
    tau: float
    draft_share: float
    mismatched_tokens: int
    accepted_by_source: dict[str, int]
    peers: dict[str, float]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def measure_set(
    prompts: PromptSet,
    contestants: Sequence[Contestant],
    measure: Measure,
    advance: Callable[[int], None] = lambda prompts: None,
) -> SpeedRow:
    """Let every contestant answer every prompt. `advance` hears of prompts as they are done."""
    return _row(prompts, take_turns(prompts.prompts, contestants, measure, advance), measure)


def _row(prompts: PromptSet, runs: dict[str, list[Run]], measure: Measure) -> SpeedRow:
    plain, speculative = runs[PLAIN], runs[SPECULATIVE]
    speeds = {name: tokens_per_second(mine) for name, mine in runs.items()}
    decode = [decode_tokens_per_second(mine) for mine in (plain, speculative)]
    return SpeedRow(
        set=prompts.name,
        temperature=measure.temperature,
        concurrency=measure.concurrency,
        prompts=len(prompts.prompts),
        tokens=sum(run.num_tokens for run in plain),
        plain_tokens_per_second=speeds[PLAIN],
        speculative_tokens_per_second=speeds[SPECULATIVE],
        speedup=speeds[SPECULATIVE] / speeds[PLAIN],
        plain_decode_tokens_per_second=decode[0],
        speculative_decode_tokens_per_second=decode[1],
        decode_speedup=decode[1] / decode[0] if decode[0] else 1.0,
        tau=tau(speculative),
        draft_share=draft_share(speculative),
        mismatched_tokens=mismatches(plain, speculative),
        accepted_by_source=accepted_by_source(speculative),
        peers={name: speed for name, speed in speeds.items() if name not in (PLAIN, SPECULATIVE)},
    )


def summary_of(rows: Sequence[SpeedRow]) -> dict[str, object]:
    """All sets together, and by temperature; means over sets, that of the speedup geometric."""
    temperatures = dict.fromkeys(row.temperature for row in rows)
    groups = [[row for row in rows if row.temperature == temperature] for temperature in temperatures]
    return {
        **_means(rows),
        "by_temperature": [{"temperature": mine[0].temperature, **_means(mine)} for mine in groups],
    }


def _means(rows: Sequence[SpeedRow]) -> dict[str, object]:
    return {
        "sets": len(rows),
        "tokens": sum(row.tokens for row in rows),
        "speedup": geometric_mean([row.speedup for row in rows]),
        "lowest_speedup": min(row.speedup for row in rows),
        "tau": fmean(row.tau for row in rows),
        "draft_share": fmean(row.draft_share for row in rows),
        "mismatched_tokens": sum(row.mismatched_tokens for row in rows),
    }


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


def contestants_of(assembly: Assembly, peers: Sequence[str]) -> list[Contestant]:
    """Plain decoding, the configured speculation, and peers, all on the same weights."""
    ours = [plain_contestant(assembly), EngineContestant(SPECULATIVE, assembly.engine())]
    others = {TransformersPeer.name: TransformersPeer}
    return [*ours, *(others[name](assembly) for name in peers)]


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


_COLUMNS: tuple[Column[SpeedRow], ...] = (
    Column("set", lambda row: row.set),
    Column("T", lambda row: f"{row.temperature:g}"),
    Column("tokens", lambda row: f"{row.tokens:,}"),
    Column("plain", lambda row: f"{row.plain_tokens_per_second:.1f}"),
    Column("speculative", lambda row: f"{row.speculative_tokens_per_second:.1f}"),
    Column("speedup", lambda row: f"{row.speedup:.2f}"),
    Column("plain, decode", lambda row: f"{row.plain_decode_tokens_per_second:.1f}"),
    Column("speculative, decode", lambda row: f"{row.speculative_decode_tokens_per_second:.1f}"),
    Column("speedup, decode", lambda row: f"{row.decode_speedup:.2f}"),
    Column("tau", lambda row: f"{row.tau:.2f}"),
    Column("drafting", lambda row: f"{100 * row.draft_share:.1f} %"),
    Column("mismatched", lambda row: str(row.mismatched_tokens)),
)


def _peer_columns(name: str) -> list[Column[SpeedRow]]:
    return [
        Column(name, lambda row: f"{row.peers[name]:.1f}"),
        Column(f"plain / {name}", lambda row: f"{row.plain_tokens_per_second / row.peers[name]:.2f}"),
        Column(f"speculative / {name}", lambda row: f"{row.speculative_tokens_per_second / row.peers[name]:.2f}"),
    ]


def _table(rows: Sequence[SpeedRow], summary: dict[str, Any]) -> Table:
    """By temperature, each with its means."""
    columns = [*_COLUMNS, *(column for name in rows[0].peers for column in _peer_columns(name))]
    table = Table(*(column.title for column in columns))
    for means in summary["by_temperature"]:
        mine = [row for row in rows if row.temperature == means["temperature"]]
        for row in mine:
            table.add_row(*(column.cell(row) for column in columns), end_section=row is mine[-1])
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
