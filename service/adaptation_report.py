"""Tells of what learning did: one line in the log and one count for each event. Knows nothing of how it is done."""

import logging
from typing import Final

from adaptation.records import Event, EventKind
from service.metrics import Metrics

logger = logging.getLogger(__name__)

_WORTH_A_LOOK: Final[frozenset[EventKind]] = frozenset({"rolled_back", "alarm", "failed", "not_stored"})


def report(event: Event, metrics: Metrics) -> None:
    """To be called from any thread, once per event."""
    metrics.observe_event(event)
    tell(event)


def tell(event: Event) -> None:
    """The line in the log alone, where nobody counts."""
    level = logging.WARNING if event.kind in _WORTH_A_LOOK else logging.INFO
    fields = {"event": event.kind, "drafter_version": event.version, "reason": event.reason}
    logger.log(level, "%s", _line(event), extra={**fields, "numbers": dict(event.numbers)})


def _line(event: Event) -> str:
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in event.numbers.items())
    reason = " ".join(event.reason.split())  # messages of exceptions may have several lines
    line = f"learning: {event.kind.replace('_', ' ')} ({reason}), drafter version {event.version}"
    return f"{line}: {numbers}" if numbers else line
