"""What `adaptree bench observing` does around the measurement: load, take turns, print, write."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from service.assembly import Assembly, assemble
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.observing import ObservingRow, Turn, rows_of, run_turn
from service.bench.prompts import read_prompts, refuse_too_long
from service.config import ServiceConfig
from service.engine.requests import GenerationRequest, SamplingParams
from service.logging import counting


def run_observing(
    config: ServiceConfig,
    file: Path,
    *,
    limit: int | None,
    max_tokens: int,
    streams: int,
    turns: int,
    out: Path | None,
) -> bool:
    """Measure and report; whether every answer was the same watched or not."""
    refuse_unwritable(out)
    assembly = assemble(config)
    prompts = read_prompts(file, assembly.tokenizer, limit=limit).prompts
    refuse_too_long(prompts, max_tokens, assembly.limits.max_model_len, "--max-tokens")
    rows = rows_of(asyncio.run(_taking_turns(assembly, _requests(prompts, max_tokens), streams, turns)))
    unwatched, watched = rows
    share = watched.tokens_per_second / unwatched.tokens_per_second
    mismatched = sum(row.mismatched_tokens for row in rows)
    Console().print(_table(rows, share))
    summary = {"watched_to_unwatched": share, "mismatched_tokens": mismatched}
    write_report(out, conditions_of(assembly), [asdict(row) for row in rows], summary)
    return mismatched == 0


async def _taking_turns(
    assembly: Assembly, requests: Sequence[GenerationRequest], streams: int, turns: int
) -> list[Turn]:
    """Both ways in turn, the first of each pair alternating, because a machine's speed drifts. One more comes first
    and is not counted: it reads the model's pages."""
    order = [way for number in range(turns) for way in ((False, True) if number % 2 else (True, False))]
    with counting() as progress:
        task = progress.add_task("answering", total=1 + len(order))
        done = []
        for watched in (False, *order):
            done.append(await run_turn(assembly, requests, streams=streams, watched=watched))
            progress.advance(task)
    return done[1:]


def _requests(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[GenerationRequest]:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [
        GenerationRequest(request_id=str(number), prompt=prompt, sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]


def _table(rows: Sequence[ObservingRow], share: float) -> Table:
    table = Table("watched", "turns", "tokens/s", "scrapes", "moments of the feed", "mismatched")
    for row in rows:
        counts = (row.scrapes, row.moments, row.mismatched_tokens)
        table.add_row("yes" if row.watched else "no", str(row.turns), f"{row.tokens_per_second:.1f}", *map(str, counts))
    table.caption = f"watched, with a scrape a second and the feed followed: {share:.3f} of unwatched"
    return table
