"""Recorded streams made to order: what drafters of known quality would have emitted per verify on the same texts."""

import numpy as np
from numpy.typing import NDArray

STEPS = 20  # verifies per sequence
DEPTH = 8


class Texts:
    """Texts of differing difficulty. Two drafters share a text's difficulty and nothing else, so that what a pair
    says is as noisy as it can be."""

    def __init__(self, seed: int, *, easiness: float = 0.5) -> None:
        self._rng = np.random.default_rng(seed)
        self._easiness = easiness

    def difficulties(self, count: int) -> NDArray[np.float64]:
        """Chance that a drafted token is accepted, by text. # [count]"""
        return self._rng.beta(10 * self._easiness, 10 * (1 - self._easiness), count)

    def scores(self, chances: NDArray[np.float64], quality: float = 1.0) -> list[float]:
        """Mean emitted tokens per verify of a drafter that has `quality` times these chances. # [count]"""
        missed = self._rng.geometric(1 - np.minimum(chances * quality, 0.95)[:, None], (len(chances), STEPS)) - 1
        scores: list[float] = (1.0 + np.minimum(missed, DEPTH).mean(axis=1)).tolist()
        return scores
