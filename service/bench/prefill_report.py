"""What `adaptree bench prefill` does around the measurement: load, print the table, write the file."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from service.assembly import Assembly, assemble
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.prefill import PrefillRow, observe, row_of
from service.bench.prompts import read_prompts, refuse_too_long
from service.config import ServiceConfig
from service.engine.engine import Engine
from service.logging import counting


def run_prefill(
    config: ServiceConfig, file: Path, *, streams: int, prompt_tokens: int, max_tokens: int, out: Path | None
) -> bool:
    """Measure with the configured chunk and in one go, and report; whether the text was the same."""
    refuse_unwritable(out)
    assembly = assemble(config)
    prompts = read_prompts(file, assembly.tokenizer).prompts
    long_prompt = list(islice(cycle([token for prompt in prompts for token in prompt]), prompt_tokens))
    refuse_too_long([long_prompt], 1, assembly.limits.max_model_len, "--prompt-tokens")
    rows = _measure(assembly, list(islice(cycle(prompts), streams)), long_prompt, max_tokens)
    Console().print(_table(rows))
    mismatched = sum(row.mismatched_tokens for row in rows)
    write_report(out, conditions_of(assembly), [row.as_json() for row in rows], {"mismatched_tokens": mismatched})
    return mismatched == 0


def _measure(
    assembly: Assembly, prompts: Sequence[Sequence[int]], long_prompt: Sequence[int], max_tokens: int
) -> list[PrefillRow]:
    chunks = (assembly.limits.prefill_chunk, len(long_prompt))
    with counting() as progress:
        seen = [
            observe(_engine(assembly, chunk), prompts, long_prompt, max_tokens=max_tokens)
            for chunk in progress.track(chunks, description="reading the long prompt")
        ]
    return [
        row_of(observed, seen[0], prefill_chunk=chunk, prompt_tokens=len(long_prompt))
        for chunk, observed in zip(chunks, seen, strict=True)
    ]


def _engine(assembly: Assembly, chunk: int) -> Engine:
    return assembly.engine(limits=replace(assembly.limits, prefill_chunk=chunk))


def _table(rows: Sequence[PrefillRow]) -> Table:
    table = Table(
        "prompt chunk", "time to first token", "itl p50", "itl p99", "itl max", "itl p50 before", "mismatched"
    )
    for row in rows:
        seconds = (row.itl_p50_seconds, row.itl_p99_seconds, row.itl_max_seconds, row.quiet_itl_p50_seconds)
        latencies = [f"{1000 * value:.0f} ms" for value in seconds]
        table.add_row(str(row.prefill_chunk), f"{row.ttft_seconds:.2f} s", *latencies, str(row.mismatched_tokens))
    table.caption = "inter-token latency of the running streams while the long prompt is read"
    return table
