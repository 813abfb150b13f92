"""How long to wait for a store that is not there: twice as long each time, and never all replicas at once."""

import random


class Backoff:
    """Seconds until the next try."""

    def __init__(self, *, first_seconds: float, most_seconds: float, rng: random.Random) -> None:
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self._rng = rng
        self._next_seconds = first_seconds

    def next(self) -> float:
        """A random time, at least half of what it could be."""
        bound = self._next_seconds
        self._next_seconds = min(self._most_seconds, 2 * bound)
        return bound * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It is there again."""
        self._next_seconds = self._first_seconds
