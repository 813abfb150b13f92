"""What `adaptree bench neighbours` does around the measurement: load, measure alone and beside, print, write."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from service.assembly import Assembly, assemble
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.neighbours import NeighbourRow, Neighbours
from service.bench.prompts import read_prompts, refuse_too_long
from service.config import ServiceConfig
from service.logging import counting

_TURNS = 2  # alone and beside, so often in turn, because a machine's speed drifts


def run_neighbours(
    config: ServiceConfig, file: Path, *, quiet: int, busy: int, answers: int, max_tokens: int, out: Path | None
) -> None:
    """Measure and report."""
    refuse_unwritable(out)
    assembly = assemble(config)
    prompts = read_prompts(file, assembly.tokenizer).prompts
    refuse_too_long(prompts, max_tokens, assembly.limits.max_model_len, "--max-tokens")
    rows = _measure(assembly, prompts, quiet=quiet, busy=busy, answers=answers, max_tokens=max_tokens)
    ratio = slowdown(rows)
    Console().print(_table(rows, ratio))
    write_report(out, conditions_of(assembly), [asdict(row) for row in rows], {"p95_loaded_to_alone": ratio})


def slowdown(rows: Sequence[NeighbourRow]) -> float:
    """95th percentile of the latency beside the others, to that alone, both averaged over the turns."""
    alone = [row.latency_p95_seconds for row in rows if not row.busy_streams]
    beside = [row.latency_p95_seconds for row in rows if row.busy_streams]
    return sum(beside) / len(beside) / (sum(alone) / len(alone))


def _measure(
    assembly: Assembly, prompts: Sequence[Sequence[int]], *, quiet: int, busy: int, answers: int, max_tokens: int
) -> list[NeighbourRow]:
    streams = [0, busy] * _TURNS
    with counting() as progress:
        task = progress.add_task("answering", total=answers * len(streams))
        return [
            Neighbours(assembly.engine(), prompts, max_tokens=max_tokens).run(
                quiet=quiet, busy=others, answers=answers, watch=lambda: progress.advance(task)
            )
            for others in streams
        ]


def _table(rows: Sequence[NeighbourRow], ratio: float) -> Table:
    table = Table("streams", "others'", "latency p50", "p95", "first token p95", "tokens/s", "of them its own")
    for row in rows:
        seconds = (row.latency_p50_seconds, row.latency_p95_seconds, row.ttft_p95_seconds)
        table.add_row(
            str(row.quiet_streams),
            str(row.busy_streams),
            *(f"{value:.2f} s" for value in seconds),
            f"{row.tokens_per_second:.0f}",
            f"{row.quiet_tokens_per_second:.0f}",
        )
    table.caption = f"p95 beside the others is {ratio:.2f} times that alone"
    return table
