"""The commands `adaptree bench prefix` and `adaptree bench neighbours`: what requests and clients share with others.

Imports nothing heavy before a command runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from service.config import LoadedConfig

_Prompts = Annotated[Path, typer.Option("--prompts", metavar="FILE", help="JSONL file with messages, turns or prompt.")]
_Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Also write the result, with its conditions, as JSON.")
]


def prefix(
    loaded: LoadedConfig,
    prompts: _Prompts,
    requests: Annotated[int, typer.Option(min=2, help="Requests, one after the other.")] = 64,
    shared_tokens: Annotated[int, typer.Option(min=2, help="Tokens that all prompts begin with.")] = 1500,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.")] = 16,
    out: _Out = None,
) -> None:
    """Time to first token of prompts that begin alike, with and without the prefix cache. Exit code 1 unless equal."""
    _log_as(loaded)
    from service.bench.prefix_report import run_prefix

    equal = run_prefix(
        loaded.config, prompts, requests=requests, shared_tokens=shared_tokens, max_tokens=max_tokens, out=out
    )
    if not equal:
        raise typer.Exit(1)


def neighbours(
    loaded: LoadedConfig,
    prompts: _Prompts,
    quiet: Annotated[int, typer.Option(min=1, help="Streams of the client that is measured.")] = 1,
    busy: Annotated[int, typer.Option(min=1, help="Streams of the other one.")] = 9,
    answers: Annotated[int, typer.Option(min=2, help="Answers to measure in each of four turns.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.")] = 64,
    out: _Out = None,
) -> None:
    """What a busy client does to the latency of a quiet one."""
    _log_as(loaded)
    from service.bench.neighbours_report import run_neighbours

    run_neighbours(loaded.config, prompts, quiet=quiet, busy=busy, answers=answers, max_tokens=max_tokens, out=out)


def _log_as(loaded: LoadedConfig) -> None:
    from service.logging import configure_logging

    configure_logging(loaded.config.log_level, as_json=loaded.config.log_json)
