"""Benchmarks of adaptree. Every setting of the server is an option of every command.

Exit code 1 if a token differs or a comparison fails.
"""

import signal
import sys
from collections.abc import Callable

import typer

from benchmarks import (
    budgets,
    checkpoint,
    clients,
    curves,
    decisions,
    finetuned,
    gpu,
    gpu_kernels,
    growing,
    idle,
    inputs,
    kinds,
    ladder,
    load,
    overlap,
    poison,
    prefixes,
    replicas,
    rivals,
    schema_suite,
    served,
    sharing,
    shift,
    side_channel,
    soak,
    step_costs,
    trees,
)
from service.bench.commands import command
from service.cli import STARTUP_EXIT_CODE, with_settings
from service.errors import StartupError

EXPERIMENTS: dict[str, Callable[..., bool]] = {
    "budgets": budgets.run,
    "clients": clients.run,
    "curves": curves.run,
    "decisions": decisions.run,
    "drafters": kinds.run,
    "gpu": gpu.run,
    "gpu-attention": gpu_kernels.run_attention,
    "gpu-linear": gpu_kernels.run_linear,
    "growing": growing.run,
    "idle": idle.run,
    "inputs": inputs.run,
    "ladder": ladder.run,
    "load": load.run,
    "overlap": overlap.run,
    "poison": poison.run,
    "prefixes": prefixes.run,
    "replicas": replicas.run,
    "rivals": rivals.run,
    "schema-suite": schema_suite.run,
    "served": served.run,
    "sharing": sharing.run,
    "shift": shift.run,
    "side-channel": side_channel.run,
    "soak": soak.run,
    "step-costs": step_costs.run,
    "trees": trees.run,
}

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


for _name, _run in EXPERIMENTS.items():
    app.command(_name)(with_settings(command(_run)))

_checkpoint = typer.Typer(help="Write a model to measure costs with.", no_args_is_help=True)
_checkpoint.command("deepened")(with_settings(command(checkpoint.run_deepened)))
_checkpoint.command("experts")(with_settings(command(checkpoint.run_experts)))
_checkpoint.command("finetuned")(with_settings(command(finetuned.run)))
_checkpoint.command("dummy")(with_settings(command(checkpoint.run_dummy)))
app.add_typer(_checkpoint, name="checkpoint")


def main() -> None:
    """Run a command. Errors that a user can cause print a message, and SIGTERM ends child processes too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        app(prog_name="python -m benchmarks")
    except StartupError as error:
        print(f"benchmarks cannot start: {error}", file=sys.stderr)
        sys.exit(STARTUP_EXIT_CODE)


if __name__ == "__main__":
    main()
