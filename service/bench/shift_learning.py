"""Learning beside a policy's engine, held still while it is another policy's turn.

Nothing here decides anything about learning: the side thread runs as it does when it serves, and while others have
their turn it waits inside a command that it was asked to run.
"""

import time
from concurrent.futures import wait
from dataclasses import dataclass, fields
from threading import Event as Signal
from threading import Lock
from typing import Protocol

from adaptation.events import Event
from adaptation.status import AdaptationStatus
from service.adaptive import Adaptive
from service.errors import StartupError

_PATIENCE_SECONDS = 900.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What learning has done."""

    training_seconds: float = 0.0
    updates_head: int = 0
    updates_full: int = 0
    publishes: int = 0
    refusals: int = 0
    rollbacks: int = 0
    discards: int = 0
    over_share: int = 0  # queries not learnt from because their client had had its quota

    @staticmethod
    def of(status: AdaptationStatus) -> "Counts":
        return Counts(
            training_seconds=status.training_seconds,
            updates_head=status.updates.get("head", 0),
            updates_full=status.updates.get("full", 0),
            publishes=status.publishes,
            refusals=status.refusals,
            rollbacks=status.rollbacks,
            discards=status.discards,
            over_share=status.excluded.get("over_share", 0),
        )

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(**{field.name: getattr(self, field.name) - getattr(other, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True)
class Noted:
    """An event, and after how many of the policy's queries it came."""

    query: int
    event: Event


class Notes:
    """Takes down events, told by any thread."""

    def __init__(self) -> None:
        self.answered = 0  # queries of the stream
        self._noted: list[Noted] = []
        self._lock = Lock()

    def clear(self) -> None:
        """Begin anew."""
        self.take()
        self.answered = 0

    def note(self, event: Event) -> None:
        with self._lock:
            self._noted.append(Noted(self.answered, event))

    def take(self) -> tuple[Noted, ...]:
        """What was noted since the last call."""
        with self._lock:
            noted, self._noted = tuple(self._noted), []
        return noted


class Beside(Protocol):
    """What goes on beside an engine during its turns, and only then."""

    def go_on(self) -> None:
        """A turn begins."""
        ...

    def settle(self) -> None:
        """The turn's last query is answered: wait until what is due has been done."""
        ...

    def hold(self) -> Counts:
        """Do nothing until the next turn. # -> what was done so far"""
        ...

    def close(self) -> None: ...


class Nobody:
    """Nobody learns: the plain comparison."""

    def go_on(self) -> None:
        """Nothing was held."""

    def settle(self) -> None:
        """Nothing is due."""

    def hold(self) -> Counts:
        return Counts()

    def close(self) -> None:
        """Nothing was started."""


class Learning:
    """The learning thread of an engine that learns while it serves."""

    def __init__(self, adaptive: Adaptive) -> None:
        self._adaptive = adaptive
        self._release = Signal()
        adaptive.start()
        self.hold()

    def go_on(self) -> None:
        self._release.set()

    def settle(self) -> None:
        """An idle thread looks for what is due twice a second; being asked for something, it does so at once."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._adaptive.settle(_POLL_SECONDS):
            asked = self._adaptive.worker.ask(lambda: None)
            wait([asked], timeout=deadline - time.monotonic())
            if not asked.done():
                raise StartupError(
                    f"learning did not come to an end within {_PATIENCE_SECONDS:.0f} s; the log says what failed"
                )

    def hold(self) -> Counts:
        counts = Counts.of(self._adaptive.status())
        self._release = Signal()
        self._adaptive.worker.ask(self._release.wait)
        return counts

    def close(self) -> None:
        self._release.set()
        self._adaptive.stop()
