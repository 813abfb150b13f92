"""The command `adaptree bench gpu`: its options, and what its exit code means.

Imports nothing heavy before it runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from service.config import LoadedConfig


def gpu(
    loaded: LoadedConfig,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run every part on a CPU with tiny shapes; the figures say nothing.")
    ] = False,
    tests: Annotated[bool, typer.Option(help="Run the tests marked gpu first.")] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the result, with its conditions, as JSON.")
    ] = None,
) -> None:
    """Confirm and measure this GPU, in under eight minutes. Exit code 1 if anything fails or a token differs."""
    from service.bench.gpu_report import run_gpu
    from service.logging import configure_logging

    configure_logging(loaded.config.log_level, as_json=loaded.config.log_json)
    if not run_gpu(loaded.config, dry_run=dry_run, with_tests=tests, out=out):
        raise typer.Exit(1)
