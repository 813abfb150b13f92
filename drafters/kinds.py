"""The record of a drafter kind: how to build one, and what the server must provide. Other distributions add kinds by
it; a trained kind has a record of its own (`TrainedKind`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from drafters.language_model.forward import LanguageModel
from drafters.network.blocks import TrainedWeights as TrainedWeights
from drafters.protocol import Drafter, DraftingSizes

Need = Literal["nothing", "weights", "model"]
"""Weights trained for the target, or another language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a server provides to build a drafter; parts that the kind does not need may be missing."""

    sizes: DraftingSizes
    argument: str = ""  # the text in parentheses after the kind's name
    weights: TrainedWeights | None = None
    draft_model: Callable[[int, int], LanguageModel] | None = None
    """Builds a model with its own keys and values, in so many slots and so many entries for trees."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A drafter kind. `build` raises ValueError for an argument it cannot read and for missing parts."""

    build: Callable[[Parts], Drafter]
    needs: Need = "nothing"
    takes_argument: bool = True
    tap_layers: Callable[[int], tuple[int, ...]] = lambda num_layers: ()
    """Layers to tap of a target with so many; for kinds with trained weights the weights' config decides."""
