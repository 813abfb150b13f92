"""What the engine tells whoever learns from it, and when it lets new weights in. Knows nothing of learning itself."""

from typing import Protocol

from drafters.feedback import Query


class Learning(Protocol):
    """All calls come from the engine thread, and must not hold it up."""

    def between_steps(self) -> int:
        """The moment at which weights may change. # -> version of the drafter that serves the next step"""
        ...

    def ended(self, query: Query) -> None:
        """A sequence has come to its own end; what was recorded in its row is there until the next step."""
        ...


class NoLearning:
    """Nobody learns."""

    def between_steps(self) -> int:
        return 0

    def ended(self, query: Query) -> None:
        """Nothing to tell."""
