"""What `adaptree bench speed` does around the measurement: load, show progress, print the table, write the file."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from drafters.none import NoDrafter
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


def run_speed(
    config: ServiceConfig,
    files: Sequence[Path],
    measure: Measure,
    *,
    limit: int | None,
    peers: Sequence[str],
    out: Path | None,
) -> bool:
    """Measure all files and report; whether plain and speculative text were the same."""
    refuse_unwritable(out)
    assembly = assemble(config)
    sets = [read_prompts(file, assembly.tokenizer, limit=limit) for file in files]
    for file, prompts in zip(files, sets, strict=True):
        refuse_too_long(prompts.prompts, measure.max_tokens, assembly.limits.max_model_len, f"prompt file {file}")
    rows = _measure_all(sets, contestants_of(assembly, peers), measure)
    conditions, summary = conditions_of(assembly), summary_of(rows)
    Console().print(_table(rows))
    write_report(out, conditions, [row.as_json() for row in rows], summary)
    return summary["mismatched_tokens"] == 0


def contestants_of(assembly: Assembly, peers: Sequence[str]) -> list[Contestant]:
    """Plain decoding, the configured speculation, and peers, all on the same weights."""
    plain = assembly.engine(drafter=NoDrafter(), policy=FixedBudget(0))
    ours = [EngineContestant(PLAIN, plain), EngineContestant(SPECULATIVE, assembly.engine())]
    others = {TransformersPeer.name: TransformersPeer}
    return [*ours, *(others[name](assembly) for name in peers)]


def _measure_all(sets: Sequence[PromptSet], contestants: Sequence[Contestant], measure: Measure) -> list[SpeedRow]:
    warm_up(contestants, sets[0].prompts[0], measure)
    with _progress() as progress:
        task = progress.add_task("", total=sum(len(prompts.prompts) for prompts in sets))
        rows = []
        for prompts in sets:
            progress.update(task, description=prompts.name)
            rows.append(measure_set(prompts, contestants, measure, lambda done: progress.advance(task, done)))
        return rows


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def _table(rows: Sequence[SpeedRow]) -> Table:
    peers = list(rows[0].peers)
    titles = ["plain", "speculative", "speedup", "plain, decode", "speculative, decode", "speedup, decode"]
    ratios = [title for name in peers for title in (name, f"plain / {name}", f"speculative / {name}")]
    table = Table("set", "tokens", *titles, "tau", "drafting", "mismatched", *ratios)
    for row in rows:
        table.add_row(row.set, str(row.tokens), *_speeds(row), *_quality(row), *_ratios(row, peers))
    table.caption = "speeds in tokens per second, prompts included; decode: without the steps that read prompts"
    return table


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
