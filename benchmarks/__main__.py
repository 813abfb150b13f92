"""`python -m benchmarks NAME`: one command per experiment, with every setting of the server as an option.

Exit code 1 if a token differs that should not, or a comparison fails.
"""

import signal
import sys
from collections.abc import Callable

import typer

from benchmarks import (
    gpu_kernels,
    growing,
    inputs,
    kinds,
    memory_costs,
    past_answers,
    peers,
    poison,
    recorded,
    replicas,
    schema_suite,
    side_channel,
    soak,
    step_costs,
)
from service.bench.commands import command
from service.cli import STARTUP_EXIT_CODE, with_settings
from service.errors import StartupError

EXPERIMENTS: dict[str, Callable[..., bool]] = {
    "drafters": kinds.run,
    "gpu-attention": gpu_kernels.run_attention,
    "gpu-linear": gpu_kernels.run_linear,
    "growing": growing.run,
    "inputs": inputs.run,
    "memory-costs": memory_costs.run,
    "past-answers": past_answers.run,
    "poison": poison.run,
    "recorded": recorded.run,
    "replicas": replicas.run,
    "schema-suite": schema_suite.run,
    "side-channel": side_channel.run,
    "soak": soak.run,
    "speed": peers.run,
    "step-costs": step_costs.run,
}

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


for _name, _run in EXPERIMENTS.items():
    app.command(_name)(with_settings(command(_run)))


def main() -> None:
    """What a user can cause ends in a message, never in a traceback; processes that were begun end with this one."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        app(prog_name="python -m benchmarks")
    except StartupError as error:
        print(f"benchmarks cannot start: {error}", file=sys.stderr)
        sys.exit(STARTUP_EXIT_CODE)


if __name__ == "__main__":
    main()
