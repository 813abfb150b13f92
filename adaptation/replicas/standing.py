"""Where a replica stands among the others, and what follows from it: who hears its queries, and whether it trains."""

from collections.abc import Callable
from typing import Literal

from adaptation.trainer import UpdateReport
from adaptation.worker import Loop
from drafters.feedback import QueryFeedback

Stand = Literal["alone", "following", "leading"]


class Standing:
    """Written by the thread that talks to the others, read by any."""

    def __init__(self, *, learns_alone: bool) -> None:
        self.now: Stand = "following"
        self._learns_alone = learns_alone

    @property
    def learns(self) -> bool:
        """Whether queries are heard here, and updates computed."""
        return self.now == "leading" or (self.now == "alone" and self._learns_alone)


class InTurn:
    """A learner that updates only while it is this replica's turn to learn."""

    def __init__(self, loop: Loop, standing: Standing) -> None:
        self._loop = loop
        self._standing = standing

    def observe(self, feedback: QueryFeedback) -> object:
        return self._loop.observe(feedback)

    def update(self, interrupted: Callable[[], bool]) -> UpdateReport | None:
        if not self._standing.learns:
            return None
        return self._loop.update(lambda: interrupted() or not self._standing.learns)

    def recover(self, error: str) -> None:
        self._loop.recover(error)

    def save(self, *, training: bool) -> None:
        self._loop.save(training=training)
