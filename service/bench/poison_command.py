"""The command `adaptree bench poison`: its options, and what its exit code means.

Imports nothing heavy before it runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from service.config import LoadedConfig

_Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write the result, with its conditions, as JSON, and a PNG beside it."),
]


def poison(
    loaded: LoadedConfig,
    honest: Annotated[list[Path], typer.Option(metavar="FILE...", help="JSONL files with honest clients' prompts.")],
    more_honest: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More of them.")] = None,
    narrow: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Prompts of the narrow client. Unset: built-in ones.")
    ] = None,
    queries: Annotated[int, typer.Option(min=8, help="Queries of honest clients, in all.")] = 300,
    share: Annotated[float, typer.Option(min=0, max=0.9, help="Share of all queries that hostile clients send.")] = 0.3,
    honest_clients: Annotated[int, typer.Option(min=1, help="Honest clients.")] = 7,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 decodes greedily.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Queries in flight at the same time.")] = 1,
    turn_queries: Annotated[
        int, typer.Option(min=1, help="Honest queries a run answers before it is the next one's turn.")
    ] = 5,
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="Seed of everything random.")] = 0,
    out: _Out = None,
) -> None:
    """What hostile clients can do to honest ones through the drafter that learns. Exit code 1 if any token differs."""
    from service.bench.poison_report import Attack, run_poison
    from service.bench.speed import Measure
    from service.logging import configure_logging

    configure_logging(loaded.config.log_level, as_json=loaded.config.log_json)
    attack = Attack(
        honest=(*honest, *(more_honest or [])),
        narrow=tuple(narrow or ()),
        queries=queries,
        honest_clients=honest_clients,
        share=share,
        turn_queries=turn_queries,
    )
    if not run_poison(loaded.config, attack, Measure(temperature, max_tokens, concurrency, seed), out=out):
        raise typer.Exit(1)
