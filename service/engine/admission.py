"""How many slots a sequence will need before it ends: what it still has to read, and what it will probably write.

Answers are as long as the recent ones were. Knows nothing of who waits or of what is free.
"""

from service.engine.sequence import Sequence

_FIRST_GUESS = 32.0
_RATE = 0.05
_NEVER_LESS = 0.25


class Forecast:
    """Learns the length of answers from those that ended."""

    def __init__(self) -> None:
        self._mean_tokens = _FIRST_GUESS

    def ended(self, sequence: Sequence) -> None:
        self._mean_tokens += _RATE * (sequence.num_generated - self._mean_tokens)

    def tokens_to_write(self, sequence: Sequence) -> int:
        """An answer beyond the mean length is expected to go on for a part of it."""
        expected = max(self._mean_tokens - sequence.num_generated, _NEVER_LESS * self._mean_tokens)
        return min(sequence.num_remaining, round(expected))

    def claim(self, sequence: Sequence) -> int:
        """Slots that a sequence will still ask for."""
        return sequence.num_pending + self.tokens_to_write(sequence)
