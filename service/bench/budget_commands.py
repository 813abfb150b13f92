"""The commands `adaptree bench drafters` and `adaptree bench calibration`: what the budget does with bad and perfect
drafters, and whether the numbers it counts with come true.

Imports nothing heavy before a command runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from service.config import LoadedConfig
from service.errors import StartupError

_Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Also write the result, with its conditions, as JSON.")
]
_Temperature = Annotated[float, typer.Option(min=0, max=2, help="0 decodes greedily.")]
_Seed = Annotated[int, typer.Option("--seed", min=0, max=2**32, help="Seed of everything random.")]


def drafters(
    loaded: LoadedConfig,
    prompts: Annotated[
        list[Path],
        typer.Option("--prompts", metavar="FILE", help="JSONL file. Give it again to mix several files."),
    ],
    queries: Annotated[int, typer.Option(min=1, help="Texts, each answered by every drafter.")] = 16,
    concurrency: Annotated[int, typer.Option(min=1, help="Texts in flight at the same time.")] = 1,
    temperature: _Temperature = 0.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Length of each answer.")] = 128,
    seed: _Seed = 0,
    out: _Out = None,
) -> None:
    """What the worst and the best drafter do to throughput behind the budget that is served.

    Against plain decoding, text by text in turn: random (random tokens, odds as any drafter might claim), liar (random
    tokens that are all claimed to be certain) and perfect (replays the answer). A good budget soon leaves random and
    liar at 0.98 of plain decoding or more, and lets perfect be several times faster. Exit code 1 if any token differs.
    """
    _log_as(loaded)
    from service.bench.drafters_report import run_drafters
    from service.bench.speed import Measure

    measure = Measure(temperature, max_tokens, concurrency, seed)
    if not run_drafters(loaded.config, prompts, measure, queries=queries, out=out):
        raise typer.Exit(1)


def numbers(text: str) -> tuple[int, ...]:
    """What --concurrency says: positive numbers in a list with commas. Raises StartupError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise StartupError(f"--concurrency {text!r}: give positive numbers such as 1,2,4,8")
    return tuple(dict.fromkeys(map(int, parts)))


def _log_as(loaded: LoadedConfig) -> None:
    from service.logging import configure_logging

    configure_logging(loaded.config.log_level, as_json=loaded.config.log_json)
