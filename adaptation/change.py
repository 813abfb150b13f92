"""Has the traffic changed? A two-sided cumulative sum (Page, 1954) over how well each query was foreseen.

Knows neither what a score is made of nor what follows from a change.
"""

import math
from collections.abc import Sequence
from statistics import fmean

_MEMORY = 128  # queries
_LEAST = 24  # queries before a score can be called unusual
_LEAST_SPREAD = 0.01
_FARTHEST = 3.0  # spreads; no single query, however odd, decides
_LEAST_VALUES = 16  # of a score; queries of which little was drafted count together


class TrafficChange:
    """Says when scores come from other traffic than before.

        z = (x - mean) / sd;   U <- max(0, U + z - k),   D <- max(0, D - z - k);   changed when U or D > h

    With k = 0.5 and h = 8 unchanged traffic is called changed once in some 10,000 queries, and a shift of one and a
    half standard deviations is noticed after about eight. What is usual is learnt anew after every change.
    """

    def __init__(self, *, slack: float, threshold: float, memory: int = _MEMORY, only_rising: bool = False) -> None:
        """`memory`: queries over which mean and spread forget; `only_rising`: falling scores are usual soon."""
        self._slack = slack
        self._threshold = threshold
        self._memory = memory
        self._only_rising = only_rising
        self._count = 0
        self._mean = self._variance = self._up = self._down = 0.0
        self._waiting: list[float] = []

    def hear(self, values: Sequence[float]) -> bool:
        """Hear what is known of one query, whose mean is its score; whether the traffic has changed."""
        self._waiting += values
        if len(self._waiting) < _LEAST_VALUES:
            return False
        score, self._waiting = fmean(self._waiting), []
        return self.observe(score)

    def observe(self, score: float) -> bool:
        """Hear of one score; whether the traffic has changed. What is no number says nothing."""
        if not math.isfinite(score):
            return False
        if self._count >= _LEAST:
            self._add(score)
        if max(self._up, self._down) > self._threshold:
            self.start_anew()
            return True
        self._remember(score)
        return False

    def suspect(self) -> None:
        """Something else has changed: half the evidence is enough now, if it is known at all what is usual."""
        if self._count < _LEAST:
            return
        self._up = max(self._up, self._threshold / 2)
        self._down = max(self._down, self._threshold / 2)

    def served_anew(self) -> None:
        """Scores come from other weights now: what is usual is soon learnt anew, and what was unusual is forgotten."""
        self._count = min(self._count, _LEAST)
        self._up = self._down = 0.0
        self._waiting = []

    def start_anew(self) -> None:
        """The traffic has changed: what is usual is not known yet."""
        self._count = 0
        self._mean = self._variance = self._up = self._down = 0.0
        self._waiting = []

    def _add(self, score: float) -> None:
        unusual = (score - self._mean) / max(math.sqrt(self._variance), _LEAST_SPREAD)
        step = min(max(unusual, -_FARTHEST), _FARTHEST)
        self._up = max(0.0, self._up + step - self._slack)
        self._down = 0.0 if self._only_rising else max(0.0, self._down - step - self._slack)

    def _remember(self, score: float) -> None:
        self._count += 1
        rate = 1.0 / min(self._count, self._memory)
        distance = score - self._mean
        self._mean += rate * distance
        self._variance = (1.0 - rate) * (self._variance + rate * distance * distance)
