"""Builds a drafter by name. The only place that knows every kind."""

from collections.abc import Callable, Sequence

from torch import Tensor

from drafters.lookup.drafter import LookupDrafter
from drafters.merged import MergedDrafter
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise
from drafters.random_tree import RandomTreeDrafter
from drafters.specblock.blocks import TrainedWeights as TrainedWeights
from drafters.specblock.drafter import SpecBlockDrafter
from drafters.trained_kinds import TRAINED_KINDS
from drafters.tree import Candidates, DraftTree

TRAINED = tuple(f"{beside}{kind}" for kind in TRAINED_KINDS for beside in ("", "lookup+"))
"""Drafters that need weights, whose files say of which kind they are."""


class NoDrafter(Drafter):
    """Grows the empty tree for everyone: plain decoding through the very same step."""

    name = "none"

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Nothing to begin."""

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        return DraftTree.empty(rows.shape[0], rows.device)

    def commit(self, committed: Committed) -> None:
        """Nothing to learn."""


def _merged(sizes: DraftingSizes, weights: TrainedWeights) -> Drafter:
    return MergedDrafter(LookupDrafter(sizes), SpecBlockDrafter(sizes, weights), sizes)


_UNTRAINED: dict[str, Callable[[DraftingSizes], Drafter]] = {
    "lookup": LookupDrafter,
    "none": lambda _: NoDrafter(),
    "random": RandomTreeDrafter,
}
_TRAINED: dict[str, Callable[[DraftingSizes, TrainedWeights], Drafter]] = {
    name: _merged if "+" in name else SpecBlockDrafter for name in TRAINED
}


def build_drafter(name: str, sizes: DraftingSizes, weights: TrainedWeights | None = None) -> Drafter:
    """The drafter of that name. Raises ValueError for an unknown one, or for a trained one without weights."""
    if name in _UNTRAINED:
        return _UNTRAINED[name](sizes)
    if name not in _TRAINED:
        raise ValueError(f"unknown drafter {name!r}: choose one of {', '.join((*_UNTRAINED, *_TRAINED))}")
    if weights is None:
        raise ValueError(f"drafter {name!r} needs trained weights: set drafter_path")
    return _TRAINED[name](sizes, weights)
