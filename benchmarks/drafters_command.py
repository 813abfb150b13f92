"""The command `python -m benchmarks drafters`."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.drafters import run_drafters
from benchmarks.kinds import budgets_of, kinds_of, run_kinds
from service.bench.commands import Concurrency, Out, Seed, Temperatures
from service.bench.experiment import Measure
from service.config import LoadedConfig
from service.errors import StartupError


def run(
    loaded: LoadedConfig,
    prompts: Annotated[
        list[Path],
        typer.Option("--prompts", metavar="FILE", help="JSONL file. Give it again to mix several files."),
    ],
    queries: Annotated[int, typer.Option(min=1, help="Texts, each answered by every drafter.")] = 16,
    concurrency: Concurrency = 1,
    temperature: Temperatures = [0.0],  # noqa: B006  # read as a signature, never changed
    max_tokens: Annotated[int, typer.Option(min=2, help="Length of each answer.")] = 128,
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[=FOLDER],...",
            help="Compare these drafters instead, each with the weights in its folder: what it knows, tau, costs and "
            "speedup, and a picture beside --out.",
        ),
    ] = None,
    nodes: Annotated[
        str,
        typer.Option(
            metavar="N,...", help="For --kinds: nodes of each tree, of all forwards there are; served: as it is served."
        ),
    ] = "8,32,64,served",
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """What the worst and the best drafter do to throughput behind the budget that is served; or kinds of drafters
    against each other.

    Against plain decoding, text by text in turn: random (random tokens, odds as any drafter might claim), liar (random
    tokens that are all claimed to be certain) and perfect (replays the answer). A good budget soon leaves random and
    liar at 0.98 of plain decoding or more, and lets perfect be several times faster. Exit code 1 if any token differs.
    """
    measures = [Measure(value, max_tokens, concurrency, seed) for value in dict.fromkeys(temperature)]
    if kinds is None:
        if len(measures) > 1:
            raise StartupError("--temperature: more than one is for --kinds; give one")
        return run_drafters(loaded.config, prompts, measures[0], queries=queries, out=out)
    compared, budgets = kinds_of(kinds), budgets_of(nodes)
    return run_kinds(loaded.config, compared, prompts, measures, budgets=budgets, limit=queries, out=out)
