"""`python -m benchmarks memory-costs`: how long a step proposes from the memory and adds to it, and bytes per token."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from torch import Tensor

from benchmarks.shared import PromptFile
from benchmarks.timing import REST, Clock, Parts, TimedDrafter, Watched
from drafters.memory.drafter import MemoryDrafter
from drafters.protocol import DraftContext, MemorySizes
from kernels import ops
from kernels.memory import PAST
from service.assembly import Assembly
from service.bench.commands import AnswerTokens, Out, Seed, numbers
from service.bench.driver import TimedStep
from service.bench.experiment import (
    PLAIN,
    Column,
    Measure,
    Row,
    conclude,
    mismatches,
    percentile,
    plain_engine,
    prepare,
    read_sets,
    table_of,
    take_turns,
    warm_up,
)
from service.config import LoadedConfig
from service.engine.budget import FixedBudget
from service.training.regenerate import read_responses

MEMORY, PROPOSE, ADD = "memory", "propose", "add"
_NODES = 8  # of a verified tree
_TURNS = 3
_SLOT_BYTES, _ROOM = 8, 64  # a token takes up to four slots; with 64 bytes for each, few are lost
_MORE = 1_000_000


def drafter_of(assembly: Assembly, num_bytes: int) -> MemoryDrafter:
    """Return a drafter whose memory has so many bytes."""
    drafter = assembly.drafter("memory", limits=replace(assembly.limits, memory=MemorySizes(num_bytes=num_bytes)))
    assert isinstance(drafter, MemoryDrafter)
    return drafter


def remember(drafter: MemoryDrafter, text: Tensor, vocab_size: int, tokens: range) -> float:
    """Fill the past answers with tokens of the text, shifted to other ids at each repetition; return bytes in use per
    token. text [count] int64"""
    memory = drafter._memory
    drafter.start([DraftContext(0, [0])])
    for first in range(tokens.start, tokens.stop, len(text)):
        piece = (text[: tokens.stop - first] + first) % vocab_size
        ops.on(memory.entries.device).add_text(memory, 0, PAST, piece)
    drafter.finish([0])
    return _SLOT_BYTES * int(torch.count_nonzero(memory.entries)) / len(tokens)


def run(
    loaded: LoadedConfig,
    prompts: PromptFile,
    responses: Annotated[list[Path], typer.Option(metavar="FILE", help="JSONL of `adaptree train regenerate`.")],
    held: Annotated[str, typer.Option(metavar="N,...", help="Tokens of past answers.")] = "10000,1000000,10000000",
    concurrency: Annotated[str, typer.Option(metavar="N,...", help="Sequences of a step.")] = "1,16",
    max_tokens: AnswerTokens = 64,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare the time the memory takes in a step with a plain step. Exit code 1 if any token differs."""
    update = {"drafter": "memory", "budget_policy": "fixed"}
    assembly = prepare(loaded.config.model_copy(update=update), out)
    vocab_size, bound = assembly.target.vocab_size, assembly.limits.memory.num_bytes
    text = torch.tensor(list(chain.from_iterable(one.response for one in read_responses(responses))))
    sequences, rows, plain = numbers(concurrency), list[Row](), plain_engine(assembly)
    (asked,) = read_sets(assembly, [prompts], _TURNS * max(sequences), max_tokens)
    endless = asked.prompts * _TURNS * max(sequences)
    for tokens in numbers(held, "--held"):
        room, clock = max(bound, _ROOM * tokens), Clock()
        drafter = drafter_of(assembly, room)
        of_token = remember(drafter, text, vocab_size, range(tokens))
        timed = TimedDrafter(drafter, clock, {"grow": PROPOSE, "commit": ADD})
        engine = assembly.engine(timed.as_drafter(), FixedBudget(_NODES))
        watching = {name: Watched(clock, one) for name, one in ((PLAIN, plain), (MEMORY, engine))}
        for count in sequences:
            measure = Measure(0.0, max_tokens, count, seed)
            warm_up(watching, endless[0], measure)
            for one in watching.values():
                one.take()
            runs = take_turns(endless[: _TURNS * count], watching, measure)
            steps = {name: one.take() for name, one in watching.items()}
            propose, add = (_microseconds(steps[MEMORY], part) for part in (PROPOSE, ADD))
            step = _microseconds(steps[PLAIN], REST)  # a plain step has no other part
            row = {"held": tokens, "sequences": count, "room_bytes": room, "bytes_per_token": of_token}
            row |= {"propose_microseconds": propose, "add_microseconds": add, "plain_step_microseconds": step}
            rows.append({**row, "share": (propose + add) / step, "mismatched_tokens": mismatches(*runs.values())})
    full = drafter_of(assembly, bound)
    enough = bound // _SLOT_BYTES
    remember(full, text, vocab_size, range(enough))
    before = psutil.Process().memory_info().rss
    remember(full, text, vocab_size, range(enough, enough + _MORE))
    summary = {
        "mismatched_tokens": sum(row["mismatched_tokens"] for row in rows),
        "resident_bytes_of_a_million_tokens_more_at_the_bound": psutil.Process().memory_info().rss - before,
    }
    return conclude(assembly, out, rows, summary, table_of(_COLUMNS, rows), f"{summary}")


def _microseconds(steps: Sequence[tuple[TimedStep, Parts]], part: str) -> float:
    """Return the median microseconds of a part."""
    return 1e6 * percentile((parts[part] for _, parts in steps), 50)


_COLUMNS: tuple[Column, ...] = (
    ("held", lambda row: f"{row['held']:,}"),
    ("sequences", lambda row: str(row["sequences"])),
    ("propose, us", lambda row: f"{row['propose_microseconds']:.0f}"),
    ("add, us", lambda row: f"{row['add_microseconds']:.0f}"),
    ("plain step, us", lambda row: f"{row['plain_step_microseconds']:.0f}"),
    ("share", lambda row: f"{row['share']:.1%}"),
    ("bytes a token", lambda row: f"{row['bytes_per_token']:.1f}"),
)
