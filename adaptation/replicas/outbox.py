"""Queries of this replica on their way to the one that leads: bounded, counted, each sent under a number of its own.

The engine only appends. A letter whose sending broke off is sent again under the same number, so that whoever gets it
twice can tell.
"""

import logging
from collections import Counter, deque

from adaptation.records import StoreRefused
from adaptation.replicas.desk import Desk
from adaptation.replicas.served import ServedWeights
from adaptation.replicas.stream import Letter, QueryStream
from adaptation.replicas.wire import Origin, Wire
from drafters.feedback import QueryFeedback

logger = logging.getLogger(__name__)

_AT_ONCE = 8  # letters, before anything else is looked at


class Outbox:
    """`offer` belongs to the engine's thread, everything else to the one that talks to the store."""

    def __init__(
        self, stream: QueryStream, wire: Wire, served: ServedWeights, *, sender: str, most_waiting: int, most_bytes: int
    ) -> None:
        self.fates: Counter[str] = Counter()  # of queries
        self._stream = stream
        self._wire = wire
        self._served = served
        self._sender = sender
        self._most_bytes = most_bytes
        self._sequence = 0
        self._waiting: deque[QueryFeedback] = deque(maxlen=most_waiting)
        self._unsent: Letter | None = None

    def offer(self, feedback: QueryFeedback) -> None:
        """What must not be stored does not leave this process; of too many the oldest is dropped."""
        if not feedback.query.store:
            self.fates["not_stored"] += 1
            return
        if len(self._waiting) == self._waiting.maxlen:
            self.fates["queue_full"] += 1
        self._waiting.append(feedback)

    def send(self) -> None:
        """Some of what waits. Raises StoreLost, and then it goes on waiting."""
        for _ in range(_AT_ONCE):
            if self._unsent is None:
                self._unsent = self._next()
            if self._unsent is None:
                return
            try:
                self._stream.send(self._unsent)
                self.fates["sent"] += 1
            except StoreRefused as error:
                logger.warning("a query was not taken: %s", error)
                self.fates["store_refused"] += 1
            self._unsent = None

    def keep(self, desk: Desk) -> None:
        """This process learns by itself now: what waits is heard here."""
        while self._waiting:
            desk.keep(self._waiting.popleft())

    def _next(self) -> Letter | None:
        while self._waiting:
            feedback = self._waiting.popleft()
            self._sequence += 1
            try:
                letter = self._wire.written(feedback, self._origin(feedback))
            except ValueError:
                self.fates["unusable"] += 1
                continue
            if letter.num_bytes <= self._most_bytes:
                return letter
            self.fates["too_large"] += 1
        return None

    def _origin(self, feedback: QueryFeedback) -> Origin:
        query = feedback.query
        return Origin(
            sender=self._sender,
            sequence=self._sequence,
            first_weights=self._served.sha256_of(query.first_version),
            weights=self._served.sha256_of(query.version),
        )
