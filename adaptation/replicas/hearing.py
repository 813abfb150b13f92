"""The queries that reach whoever leads: read, doubted, heard once each, and only then done with.

Knows nothing of what the learner makes of them.
"""

import logging
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final

from adaptation.records import Refused
from adaptation.replicas.desk import Desk
from adaptation.replicas.served import ServedWeights
from adaptation.replicas.stream import Delivered, QueryStream
from adaptation.replicas.wire import Received, Wire
from drafters.feedback import QueryFeedback

logger = logging.getLogger(__name__)

_AT_ONCE = 4  # letters that may wait for the learner; each holds the features of a text
_MOST_SENDERS: Final = 4096


@dataclass(frozen=True, slots=True)
class _Heard:
    number: bytes
    origin: str
    sequence: int
    answer: Future[object]


class Hearing:
    """All calls come from the thread that talks to the store."""

    def __init__(self, stream: QueryStream, wire: Wire, served: ServedWeights, desk: Desk) -> None:
        self.fates: Counter[str] = Counter()  # of queries
        self._stream = stream
        self._wire = wire
        self._served = served
        self._desk = desk
        self._marks: dict[str, int] = {}  # by sender, the last sequence number that was handed to the learner
        self._waiting: deque[_Heard] = deque()

    def take_over(self) -> None:
        """This replica leads from now on. Raises StoreLost."""
        self._waiting.clear()
        for sender, mark in self._stream.take_over().items():
            self._marks[sender] = max(mark, self._marks.get(sender, mark))

    def turn(self) -> None:
        """Hand over what has arrived, and be done with what was heard. Raises StoreLost."""
        self._conclude()
        room = _AT_ONCE - len(self._waiting)
        for delivered in self._stream.receive(room) if room else ():
            self._take(delivered)

    def _conclude(self) -> None:
        """The learner hears in order. Whatever broke over a query breaks again: it is not handed over twice."""
        heard: list[_Heard] = []
        for waiting in self._waiting:
            if not waiting.answer.done() or waiting.answer.cancelled():
                break
            heard.append(waiting)
        if heard:
            self._stream.done([one.number for one in heard], {one.origin: one.sequence for one in heard})
            self.fates["heard"] += len(heard)
        for _ in heard:
            self._waiting.popleft()

    def _take(self, delivered: Delivered) -> None:
        try:
            received = self._read(delivered)
        except Refused as refusal:
            if not self.fates[refusal.reason]:  # the others are counted: whoever sends one sends more
                logger.warning("a query of another replica is not heard: %s", refusal)
            self._drop(delivered, refusal.reason)
            return
        origin = received.origin
        if origin.sequence <= self._marks.get(origin.sender, -1):
            self._drop(delivered, "duplicate")
            return
        self._mark(origin.sender, origin.sequence)
        answer = self._desk.observe(self._in_our_versions(received))
        self._waiting.append(_Heard(delivered.number, origin.sender, origin.sequence, answer))

    def _read(self, delivered: Delivered) -> Received:
        if delivered.letter is None:
            raise Refused("misfit", "an entry of the stream that is no query")
        return self._wire.read(delivered.letter)

    def _drop(self, delivered: Delivered, fate: str) -> None:
        self.fates[fate] += 1
        self._stream.done([delivered.number], {})

    def _mark(self, sender: str, sequence: int) -> None:
        """Senders that were not heard for the longest time are forgotten first."""
        self._marks.pop(sender, None)
        self._marks[sender] = sequence
        if len(self._marks) > _MOST_SENDERS:
            del self._marks[next(iter(self._marks))]

    def _in_our_versions(self, received: Received) -> QueryFeedback:
        feedback, first = received.feedback, self._served.version_of(received.origin.first_weights)
        version = self._served.version_of(received.origin.weights)
        return replace(feedback, query=replace(feedback.query, first_version=first, version=version))
