"""Builds a drafter by name. The only place that knows every kind."""

import re
from collections.abc import Callable, Sequence

from torch import Tensor

from drafters.lookahead.drafter import LookaheadDrafter
from drafters.lookup.drafter import LookupDrafter
from drafters.merged import MergedDrafter
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise
from drafters.random_tree import RandomTreeDrafter
from drafters.specblock.blocks import TrainedWeights as TrainedWeights
from drafters.specblock.drafter import SpecBlockDrafter
from drafters.switch import SwitchDrafter
from drafters.tree import Candidates, DraftTree

MERGED = "lookup+specblock"
TRAINED = ("specblock", MERGED, "switch(lookup,specblock)")
"""Drafters that need weights."""


class NoDrafter(Drafter):
    """Grows the empty tree for everyone: plain decoding through the very same step."""

    name = "none"

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Nothing to begin."""

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        return DraftTree.empty(rows.shape[0], rows.device)

    def commit(self, committed: Committed) -> None:
        """Nothing to learn."""


_UNTRAINED: dict[str, Callable[[DraftingSizes], Drafter]] = {
    "lookahead": LookaheadDrafter,
    "lookup": LookupDrafter,
    "none": lambda _: NoDrafter(),
    "random": RandomTreeDrafter,
}
_TRAINED: dict[str, Callable[[DraftingSizes, TrainedWeights], Drafter]] = {
    "specblock": SpecBlockDrafter,
    MERGED: lambda sizes, weights: MergedDrafter(LookupDrafter(sizes), SpecBlockDrafter(sizes, weights), sizes),
}


_SWITCH = re.compile(r"switch\(([^,]+),(.+)\)")


def sources_of(name: str) -> tuple[str, ...]:
    """Whom tokens of the drafter of that name are credited to."""
    two = _SWITCH.fullmatch(name)
    return tuple(name.split("+")) if two is None else two.groups()


def build_drafter(name: str, sizes: DraftingSizes, weights: TrainedWeights | None = None) -> Drafter:
    """The drafter of that name. Raises ValueError for an unknown one, or for a trained one without weights."""
    if (two := _SWITCH.fullmatch(name)) is not None:
        first, second = (build_drafter(part, sizes, weights) for part in two.groups())
        return SwitchDrafter(first, second, sizes)
    if name in _UNTRAINED:
        return _UNTRAINED[name](sizes)
    if name not in _TRAINED:
        raise ValueError(f"unknown drafter {name!r}: choose one of {', '.join((*_UNTRAINED, *_TRAINED))}, switch(A,B)")
    if weights is None:
        raise ValueError(f"drafter {name!r} needs trained weights: set drafter_path")
    return _TRAINED[name](sizes, weights)
