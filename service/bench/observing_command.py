"""The command `adaptree bench observing`: its options, and what its exit code means.

Imports nothing heavy before it runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from service.config import LoadedConfig


def observing(
    loaded: LoadedConfig,
    prompts: Annotated[Path, typer.Option(metavar="FILE", help="JSONL file with messages, turns or prompt.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.")] = 128,
    streams: Annotated[int, typer.Option(min=1, help="Requests in flight at the same time.")] = 1,
    turns: Annotated[int, typer.Option(min=1, help="How often each way has its turn.")] = 4,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the result, with its conditions, as JSON.")
    ] = None,
) -> None:
    """Tokens per second with metrics, live state and a reader of both, and without. Exit code 1 if a token differs."""
    from service.bench.observing_report import run_observing
    from service.logging import configure_logging

    configure_logging(loaded.config.log_level, as_json=loaded.config.log_json)
    equal = run_observing(
        loaded.config, prompts, limit=limit, max_tokens=max_tokens, streams=streams, turns=turns, out=out
    )
    if not equal:
        raise typer.Exit(1)
