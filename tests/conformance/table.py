"""`python -m tests.conformance.table` prints the table of docs/models.md: every kind of model with its figures."""

import logging
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
import typer

from tests.conformance.checkpoints import CHECKPOINTS, Checkpoint
from tests.conformance.judges import LlamaCpp
from tests.conformance.measures import FORMS, Figure, kinds_of, of_file, of_folder

_HEAD = ("model", "form", "options", "judge's peer", "ours", "theirs", "least dropped option")


def rows(only: str = "") -> Iterator[tuple[str, ...]]:
    """Yield a line for each kind of model and form."""
    llama_cpp = LlamaCpp()
    for checkpoint in (one for one in CHECKPOINTS if only in str(one)):
        for name, form in FORMS.items():
            with tempfile.TemporaryDirectory() as folder:
                yield _row(
                    checkpoint, f"safetensors, {name}", "transformers", of_folder(checkpoint, form, Path(folder))
                )
        for name, kind in kinds_of(checkpoint).items() if checkpoint.gguf else ():
            with tempfile.TemporaryDirectory() as folder:
                yield _row(checkpoint, f"GGUF, {name}", "llama.cpp", of_file(checkpoint, kind, Path(folder), llama_cpp))
    llama_cpp.close()


def _row(checkpoint: Checkpoint, form: str, peer: str, figure: Figure) -> tuple[str, ...]:
    least = min((far.mean for far in figure.dropped.values()), default=None)
    options, seen = ", ".join(checkpoint.options) or "-", "-" if least is None else f"{least:.1e}"
    return str(checkpoint), form, options, peer, str(figure.ours), str(figure.theirs), seen


def main(only: str = "") -> None:
    """Print the table, of kinds of models whose names contain `only`."""
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    for row in chain((_HEAD, ("---",) * len(_HEAD)), rows(only)):
        typer.echo(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    typer.run(main)
