"""What a kind of drafter is: how one is built, and what a server must have for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from drafters.language_model.model import LanguageModel
from drafters.protocol import Drafter, DraftingSizes
from drafters.specblock.blocks import TrainedWeights as TrainedWeights

Need = Literal["nothing", "weights", "model", "layers"]
"""Weights trained for the target, another language model, or layers of the target itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a server has for its drafter; of what the kind does not need there may be nothing."""

    sizes: DraftingSizes
    argument: str = ""  # what stands in parentheses behind the kind's name
    weights: TrainedWeights | None = None
    draft_model: Callable[[int, int], LanguageModel] | None = None
    """On keys and values of its own, in so many slots and places for trees."""
    first_layers: Callable[[int], LanguageModel] | None = None
    """So many layers of the target, on the target's keys and values."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to draft. `build` raises ValueError for an argument that it cannot take."""

    build: Callable[[Parts], Drafter]
    needs: Need = "nothing"
    takes_argument: bool = True
    tap_layers: Callable[[int], tuple[int, ...]] = lambda num_layers: ()
    """Which of so many layers of the target it is told the outputs of; trained weights say so themselves."""
