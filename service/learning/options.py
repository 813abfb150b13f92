"""Options of a training run. Does not import torch, so that the commands' --help is fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from drafters.trained_kinds import OF_TARGETS, TRAINED_KINDS, is_trained_kind
from service.errors import StartupError

ABLATIONS = ("shift", "broadcast", "valid_prefix", "coupling", "rank")
"""Parts of the method that a run can leave out to measure their effect, see --ablate."""

_KINDS = tuple(name for name in TRAINED_KINDS if name not in OF_TARGETS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """Options of a training run; each field is an option of the commands that train. Raises StartupError for an
    unknown kind or ablation."""

    draft_vocab: Annotated[int, typer.Option(min=16, help="Tokens the drafter can propose.")] = 8192
    kind: Annotated[  # "--kind" is explicit, because typer 0.27 would mistake a metavar equal to the name for it
        str, typer.Option("--kind", metavar="KIND", help=f"What to train: {', '.join(_KINDS)}.")
    ] = "specblock"
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Decoder layers; 2 continue the tapped features exactly. Unset: the kind's."),
    ] = None
    start_from: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Start from the weights of this drafter, of any kind, instead of the target's."
        ),
    ] = None
    ablate: Annotated[
        str, typer.Option(metavar="LIST", help="Leave out: shift,broadcast,valid_prefix,coupling,rank.")
    ] = ""
    learning_rate: Annotated[float, typer.Option(min=0, help="Largest learning rate.")] = 5e-4
    batch_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a step, in each process.")] = 2000
    warm_up: Annotated[int, typer.Option(min=1, help="Steps until the full rate, and until the rank head learns.")] = 50
    evaluate_minutes: Annotated[float, typer.Option(min=0, help="Minutes between evaluations on held-out texts.")] = 5.0
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of everything random.")] = 0

    def __post_init__(self) -> None:
        if self.kind in OF_TARGETS or not is_trained_kind(self.kind):
            raise StartupError(f"--kind {self.kind}: choose one of {', '.join(_KINDS)}")
        unknown = sorted(self.without - set(ABLATIONS))
        if unknown:
            raise StartupError(f"--ablate {', '.join(unknown)}: choose among {', '.join(ABLATIONS)}")

    @property
    def without(self) -> frozenset[str]:
        """Parts of the method to leave out, a subset of ABLATIONS."""
        return frozenset(name.strip() for name in self.ablate.split(",") if name.strip())
