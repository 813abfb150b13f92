"""`python -m benchmarks growing`: what past answers gain as a server fills its memory, from an empty one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Annotated

import typer

from drafters.protocol import MemorySizes
from service.assembly import Assembly
from service.bench.commands import AnswerTokens, Concurrency, MorePromptFiles, Out, PromptFiles, Seed, Temperatures
from service.bench.driver import Run, generate
from service.bench.experiment import (
    PLAIN,
    Column,
    Contestant,
    Measure,
    Row,
    conclude,
    counted,
    mismatches,
    plain_engine,
    prepare,
    read_sets,
    shown,
    speed_ratio,
    table_of,
    take_turns,
    tau,
    tokens_per_second,
    warm_up,
)
from service.config import LoadedConfig

ON, OFF, OFF_AGAIN = "memory on", "memory off", "memory off again"
_PAIRS = ((ON, OFF), (OFF_AGAIN, OFF), (ON, PLAIN), (OFF, PLAIN))


def contestants_of(assembly: Assembly) -> dict[str, Contestant]:
    """Return new engines on the same target; without past answers drafts copy from their own text only."""
    without = replace(assembly.limits, memory=MemorySizes())
    off, again = (assembly.engine(limits=without) for _ in range(2))
    engines = {PLAIN: plain_engine(assembly), OFF: off, OFF_AGAIN: again, ON: assembly.engine()}
    return {name: partial(generate, engine) for name, engine in engines.items()}


def row_of(what: Row, runs: Mapping[str, Sequence[Run]], pairs: Iterable[tuple[str, str]]) -> Row:
    """Return the figures of all contestants; ratios of tokens per second, of these pairs, have intervals over turns."""
    return {
        **what,
        "requests": sum(len(run.answers) for run in runs[PLAIN]),
        "tokens_per_second": {name: tokens_per_second(mine) for name, mine in runs.items()},
        "tau": {name: tau(mine) for name, mine in runs.items()},
        "ratios": {f"{a} over {b}": speed_ratio(runs[a], runs[b]) for a, b in pairs},
        "mismatched_tokens": sum(mismatches(runs[PLAIN], mine) for mine in runs.values()),
    }


def _part(runs: Mapping[str, Sequence[Run]], turns: slice) -> dict[str, Sequence[Run]]:
    return {name: mine[turns] for name, mine in runs.items()}


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests of each file.")] = 250,
    window: Annotated[int, typer.Option(min=1, help="Requests of each point of the curve.")] = 50,
    last: Annotated[int, typer.Option(min=1, help="Requests at the end that the summary compares.")] = 80,
    temperature: Temperatures = [0.0, 0.7],  # noqa: B006  # read as a signature, never changed
    max_tokens: AnswerTokens = 64,
    concurrency: Concurrency = 1,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare engines with and without past answers, in turn with plain decoding, over the requests of each file. Exit
    code 1 if any token differs."""
    assembly = prepare(loaded.config, out)
    sets = read_sets(assembly, [*prompts, *(more_prompts or [])], requests, max_tokens)
    measures = [Measure(value, max_tokens, concurrency, seed) for value in dict.fromkeys(temperature)]
    warm_up(contestants_of(assembly), sets[0].prompts[0], measures[0])
    turns, rows, ends = max(1, window // concurrency), list[Row](), list[Row]()
    with counted(len(measures) * sum(len(one.prompts) for one in sets), "requests") as advance:
        for one, measure in product(sets, measures):
            runs = take_turns(one.prompts, contestants_of(assembly), measure, advance)
            what = {"set": one.name, "temperature": measure.temperature}
            firsts = range(0, len(runs[PLAIN]), turns)
            rows += [
                row_of({**what, "first": at * concurrency}, _part(runs, slice(at, at + turns)), _PAIRS) for at in firsts
            ]
            end = _part(runs, slice(-max(1, last // concurrency), None))
            ends.append(row_of({**what, "first": "end"}, end, _PAIRS))
    summary = {"mismatched_tokens": sum(row["mismatched_tokens"] for row in rows), "end": ends}
    table = table_of(
        _COLUMNS, [*rows, *ends], section=lambda row: (row["set"], row["temperature"], row["first"] == "end")
    )
    return conclude(assembly, out, rows, summary, table)


def ratio_column(a: str, b: str) -> Column:
    """Return the column of a ratio in rows of `row_of`."""
    return f"{a} over {b}", lambda row: shown(row["ratios"][f"{a} over {b}"])


_COLUMNS: tuple[Column, ...] = (
    ("set", lambda row: f"{row['set']}, T = {row['temperature']:g}"),
    ("from", lambda row: str(row["first"])),
    ("tau on, off", lambda row: f"{row['tau'][ON]:.2f}, {row['tau'][OFF]:.2f}"),
    *(ratio_column(*pair) for pair in _PAIRS),
)
