"""What happened lately, and how often each kind of thing has: listens to events and passes them on.

Written by the thread that learns, read by any.
"""

import time
from collections import Counter, deque
from collections.abc import Callable

from adaptation.events import Emit, Event, EventKind
from adaptation.status import PastEvent

_KEPT = 50


class History:
    """An `Emit` between the learner and whoever wants its events."""

    def __init__(self, onward: Emit, *, now: Callable[[], float] = time.time) -> None:
        self.counts: Counter[EventKind] = Counter()
        self._onward = onward
        self._now = now
        self._last: deque[PastEvent] = deque(maxlen=_KEPT)

    def __call__(self, event: Event) -> None:
        self.counts[event.kind] += 1
        self._last.append(PastEvent(self._now(), event.kind, event.version, event.reason, dict(event.numbers)))
        self._onward(event)

    @property
    def last(self) -> tuple[PastEvent, ...]:
        """The newest events, oldest first."""
        return tuple(self._last)
