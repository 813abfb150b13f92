"""What `adaptree bench prefix` does around the measurement: load, make prompts that begin alike, print, write."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from service.assembly import Assembly, assemble
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.prefix import PrefixRow, measure, row_of
from service.bench.prompts import read_prompts, refuse_too_long
from service.config import ServiceConfig
from service.logging import counting


def run_prefix(
    config: ServiceConfig, file: Path, *, requests: int, shared_tokens: int, max_tokens: int, out: Path | None
) -> bool:
    """Measure and report; whether every answer was the same with the cache and without it."""
    refuse_unwritable(out)
    assembly = assemble(config)
    prompts = prompts_alike(read_prompts(file, assembly.tokenizer).prompts, requests, shared_tokens)
    refuse_too_long(prompts, max_tokens, assembly.limits.max_model_len, "--shared-tokens")
    rows = _measure(assembly, prompts, shared_tokens, max_tokens)
    Console().print(_table(rows))
    mismatched = sum(row.mismatched_tokens for row in rows)
    summary = {"mismatched_tokens": mismatched, "later_to_first": rows[0].ratio}
    write_report(out, conditions_of(assembly), [asdict(row) for row in rows], summary)
    return mismatched == 0


def prompts_alike(prompts: Sequence[Sequence[int]], requests: int, shared_tokens: int) -> list[list[int]]:
    """So many prompts that share their first tokens: real text, then a prompt of the file each."""
    shared = list(islice(cycle([token for prompt in prompts for token in prompt]), shared_tokens))
    return [[*shared, *prompt] for prompt in islice(cycle(prompts), requests)]


def _measure(
    assembly: Assembly, prompts: Sequence[Sequence[int]], shared_tokens: int, max_tokens: int
) -> list[PrefixRow]:
    ways = (False, True)
    with counting() as progress:
        task = progress.add_task("asking", total=len(ways) * len(prompts))
        read, kept = (
            measure(
                assembly.engine(limits=replace(assembly.limits, prefix_cache=way)),
                prompts,
                max_tokens=max_tokens,
                watch=lambda: progress.advance(task),
            )
            for way in ways
        )
    return [row_of(asked, read, prefix_cache=asked is kept, shared_tokens=shared_tokens) for asked in (kept, read)]


def _table(rows: Sequence[PrefixRow]) -> Table:
    table = Table("prefix cache", "first", "later p50", "later p95", "later / first", "cached tokens", "mismatched")
    for row in rows:
        seconds = (row.ttft_first_seconds, row.ttft_later_p50_seconds, row.ttft_later_p95_seconds)
        table.add_row(
            "on" if row.prefix_cache else "off",
            *(f"{1000 * value:.0f} ms" for value in seconds),
            f"{row.ratio:.3f}",
            str(row.cached_tokens),
            str(row.mismatched_tokens),
        )
    table.caption = f"time to first token of {rows[0].requests} prompts that share {rows[0].shared_tokens} tokens"
    return table
