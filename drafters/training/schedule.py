"""How long a run lasts and how fast it learns meanwhile: warm-up, then a cosine down to a small rest."""

import math
from dataclasses import dataclass

from drafters.training.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Length:
    """The end of a run: so many steps or so many seconds, whichever comes first."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None:
            raise TrainingError("say how long to train: minutes, steps or both")

    def fraction(self, steps: int, seconds: float) -> float:
        """How much of the run is over, 0 to 1."""
        parts = [steps / self.steps] if self.steps is not None else []
        parts += [seconds / self.seconds if self.seconds else 1.0] if self.seconds is not None else []
        return min(1.0, max(parts))


def rate_factor(step: int, fraction: float, *, warm_up_steps: int, least: float) -> float:
    """What the learning rate is multiplied by at a step, counted from 0."""
    rising = min(1.0, (step + 1) / max(1, warm_up_steps))
    return rising * (least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * fraction)))
