"""Learning beside a policy's engine, held still while it is another policy's turn.

Nothing here decides anything about learning: the side thread runs as it does when it serves, and while others have
their turn it stands still where it is, be it between two steps of an update. A process that trains is stopped at once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from threading import Event as Signal
from threading import Lock
from typing import Protocol

from adaptation.process import TrainingProcess
from adaptation.records import AdaptationStatus, Event
from adaptation.trainer import UpdateReport
from adaptation.worker import Loop
from drafters.feedback import QueryFeedback
from service.adaptive import Adaptive
from service.errors import StartupError

_PATIENCE_SECONDS = 900.0
_GLANCE_SECONDS = 0.002


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

    def hold(self) -> None:
        """The turn is over: do nothing until the next one."""
        ...

    def counts(self) -> Counts:
        """What was done so far; to be asked while it is held."""
        ...

    def close(self) -> None: ...


class Nobody:
    """Nobody learns: the plain comparison."""

    def go_on(self) -> None:
        """Nothing was held."""

    def hold(self) -> None:
        """Nothing goes on."""

    def counts(self) -> Counts:
        return Counts()

    def close(self) -> None:
        """Nothing was started."""


class Learning:
    """The learning thread of an engine that learns while it serves. It takes the engine's learning over for good."""

    def __init__(self, adaptive: Adaptive) -> None:
        self._adaptive = adaptive
        self._held = _Held(adaptive.worker.loop, adaptive.process)
        adaptive.worker.loop = self._held
        if adaptive.process is not None:
            adaptive.process.before_asking = self._held.stand
        adaptive.start()
        self.hold()

    def go_on(self) -> None:
        self._held.go_on()

    def hold(self) -> None:
        """Waits for the step or the replay that is under way, unless another process does it. Raises StartupError."""
        worker = self._adaptive.worker
        asked = worker.ask(lambda: None)  # an idle thread would look for what is due twice a second only
        if not self._held.hold(_PATIENCE_SECONDS):
            raise StartupError(f"learning does not stand still after {_PATIENCE_SECONDS:.0f} s; the log says why")
        asked.cancel()

    def counts(self) -> Counts:
        return Counts.of(self._adaptive.overview.status(self._adaptive.worker))  # not by the thread: it stands

    def close(self) -> None:
        self._held.go_on()
        self._adaptive.stop()


class _Held:
    """What a learning thread runs, as long as nobody holds it."""

    def __init__(self, loop: Loop, process: TrainingProcess | None) -> None:
        self._loop = loop
        self._process = process
        self._free = Signal()
        self._free.set()
        self._standing = Signal()

    def hold(self, timeout_seconds: float) -> bool:
        """Let the thread stand still, or wait for a process that does; True once it does. Not to be called twice
        without `go_on`."""
        self._free.clear()
        deadline = time.monotonic() + timeout_seconds
        while not (self._freezes_process() or self._standing.wait(_GLANCE_SECONDS)):
            if time.monotonic() > deadline:
                return False
        return True

    def go_on(self) -> None:
        self._standing.clear()
        self._free.set()
        if self._process is not None:
            self._process.thaw()

    def _freezes_process(self) -> bool:
        """Stop the process amid what it does; whether the thread waits for that."""
        if self._process is None or not self._process.is_asked:
            return False
        self._process.freeze()
        return True

    def observe(self, feedback: QueryFeedback) -> object:
        self.stand()
        return self._loop.observe(feedback)

    def update(self, interrupted: Callable[[], bool]) -> UpdateReport | None:
        """Stands still before it and between its steps."""
        self.stand()

        def passed() -> bool:
            self.stand()
            return interrupted()

        return self._loop.update(passed)

    def recover(self, error: str) -> None:
        self._loop.recover(error)

    def save(self, *, training: bool) -> None:
        self._loop.save(training=training)

    def stand(self) -> None:
        """Wait until nobody holds it."""
        while not self._free.is_set():
            self._standing.set()
            self._free.wait()
