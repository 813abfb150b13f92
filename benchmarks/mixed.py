"""An hour of mixed use: bursts of one to 64 requests, short and long, as chance wants it; and how often the budget by
cost has suspended drafting where a fixed one gains by it."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from service.bench.commands import AnswerTokens, MorePromptFiles, Out, PromptFiles, Seed
from service.bench.driver import ClosedLoop, Run, generate
from service.bench.experiment import (
    PLAIN,
    Column,
    Measure,
    Row,
    conclude,
    counted,
    mismatches,
    prepare,
    read_sets,
    request_of,
    rotated,
    table_of,
)
from service.bench.load import ADAPTIVE, engines_of
from service.config import LoadedConfig
from service.engine.budget import FixedBudget
from service.engine.requests import GenerationRequest

FIXED = "fixed:4"
SIZES = (1, 1, 1, 1, 1, 2, 2, 3, 4, 8, 16, 32, 64)
"""Requests at a time."""
WINDOW = 50  # steps
WINS = 1.02  # of a fixed budget over the one by cost, that is more than chance


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests of clients that each ask again as soon as they are answered."""

    clients: int
    requests: tuple[GenerationRequest, ...]


def bursts_of(prompts: Sequence[Sequence[int]], count: int, measure: Measure) -> list[Burst]:
    """The same ones for the same seed; answers have up to twice as many tokens as are asked for."""
    rng = random.Random(measure.seed)
    bursts = []
    for _ in range(count):
        clients = rng.choice(SIZES)
        rounds = rng.randint(1, 4) if clients < 8 else 1
        requests = []
        for number in range(clients * rounds):
            mine = replace(measure, max_tokens=rng.randint(1, 2 * measure.max_tokens))
            requests.append(request_of(number, rng.choice(prompts), mine))
        bursts.append(Burst(clients, tuple(requests)))
    return bursts


def row_of(burst: Burst, runs: Mapping[str, Run]) -> Row:
    """A burst; its windows are those of the budget by cost."""
    mine = runs[ADAPTIVE]
    windows = [
        sum(step.stats.budget_reason == "suspended" for step in window)
        for window in (mine.steps[end - WINDOW : end] for end in range(WINDOW, len(mine.steps) + 1, WINDOW))
    ]
    return {
        "clients": burst.clients,
        "requests": len(burst.requests),
        "tokens": mine.num_tokens,
        "seconds": {name: run.seconds for name, run in runs.items()},
        "windows": len(windows),
        "suspended_windows": sum(2 * suspended > WINDOW for suspended in windows),
        "mismatched_tokens": sum(mismatches([runs[PLAIN]], [run]) for run in runs.values()),
    }


def summary_of(rows: Sequence[Row]) -> dict[str, object]:
    """Over all bursts, and over those in which the fixed budget was faster than the one by cost."""
    seconds = {name: sum(row["seconds"][name] for row in rows) for name in rows[0]["seconds"]}
    lost = [row for row in rows if row["seconds"][ADAPTIVE] > WINS * row["seconds"][FIXED]]
    windows = sum(row["windows"] for row in lost)
    return {
        "adaptive_over_plain": seconds[PLAIN] / seconds[ADAPTIVE],
        "adaptive_over_fixed": seconds[FIXED] / seconds[ADAPTIVE],
        "windows": sum(row["windows"] for row in rows),
        "suspended_windows": sum(row["suspended_windows"] for row in rows),
        "windows_where_fixed_wins": windows,
        "suspended_where_fixed_wins": sum(row["suspended_windows"] for row in lost) / max(1, windows),
        "mismatched_tokens": sum(row["mismatched_tokens"] for row in rows),
    }


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    bursts: Annotated[int, typer.Option(min=1, help="How many there are.")] = 60,
    max_tokens: AnswerTokens = 64,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Bursts of one to 64 requests: the budget by cost beside a fixed one of 4 nodes and plain decoding."""
    assembly = prepare(loaded.config, out)
    measure = Measure(max_tokens=max_tokens, concurrency=1, temperature=0.0, seed=seed)
    files = [*prompts, *(more_prompts or [])]
    texts = [prompt for one in read_sets(assembly, files, None, 2 * max_tokens) for prompt in one.prompts]
    all_bursts = bursts_of(texts, bursts, measure)
    policies = {PLAIN: FixedBudget(0), FIXED: FixedBudget(4), ADAPTIVE: None}
    engines = engines_of(assembly, policies, max(map(len, texts)) + 2 * max_tokens, max(SIZES))
    rows = []
    with counted(len(all_bursts), "bursts") as advance:
        for turn, burst in enumerate(all_bursts):
            runs = {}
            for name in rotated(list(engines), turn):
                runs[name] = generate(engines[name], burst.requests, ClosedLoop(burst.clients))
            rows.append(row_of(burst, runs))
            advance(1)
    summary = summary_of(rows)
    table = table_of(_COLUMNS, rows, caption="tokens/s; suspended: windows of 50 steps without drafting")
    return conclude(assembly, out, rows, summary, table, *(f"{key}: {summary[key]}" for key in summary))


def _speed(name: str) -> Column:
    return name, lambda row: f"{row['tokens'] / row['seconds'][name]:.1f}"


_COLUMNS: tuple[Column, ...] = (
    ("clients", lambda row: str(row["clients"])),
    ("requests", lambda row: str(row["requests"])),
    ("tokens", lambda row: str(row["tokens"])),
    *map(_speed, (PLAIN, FIXED, ADAPTIVE)),
    ("suspended", lambda row: f"{row['suspended_windows']} of {row['windows']}"),
)
