"""The record of a drafter kind: how to build a drafter, and what the server must provide for it. Plug-ins of other
distributions register a `Kind`, or a `TrainedKind` for trained weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from drafters.language_model.forward import LanguageModel
from drafters.network.blocks import TrainedWeights as TrainedWeights
from drafters.protocol import Drafter, DraftingSizes

Need = Literal["nothing", "weights", "model"]
"""What a kind needs besides sizes: nothing, weights trained for the target, or another language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a server provides to build a drafter. Parts that the kind does not need may be None."""

    sizes: DraftingSizes
    weights: TrainedWeights | None = None
    draft_model: Callable[[int, int], LanguageModel] | None = None
    """Loads the draft model; arguments are the slots of its KV pool and the further entries for tree nodes."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A drafter kind, as the registry and plug-ins define it. `build` raises ValueError for missing parts."""

    build: Callable[[Parts], Drafter]
    needs: Need = "nothing"
    tap_layers: Callable[[int], tuple[int, ...]] = lambda num_layers: ()
    """Maps the target's number of layers to the layers to tap; not used if the kind needs trained weights."""
