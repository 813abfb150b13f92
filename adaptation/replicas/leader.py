"""The leader's part of a replica: it observes the queries of all replicas, announces the served version, and shares the
policy's state.

Every change of the weights served here is announced, whether by an update, a rollback or an operator. All calls come
from the thread that talks to the store.
"""

import logging
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from pydantic import JsonValue

from adaptation.checkpoint import now
from adaptation.feedback import FilteredQuery
from adaptation.records import Refused
from adaptation.replicas.follower import Follower, Replica, ServedVersion
from adaptation.replicas.redis_store import QueryMessage
from adaptation.replicas.wire import VersionRecord, sign, verify

logger = logging.getLogger(__name__)

_MESSAGES_AT_ONCE: Final = 4  # queries waiting for the learner; each holds the features of a text
_MAX_SENDERS: Final = 4096
_SHARE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Handed:
    """A query that was handed to the learner's thread and is not acknowledged yet."""

    entry_id: bytes
    sender: str
    sequence: int
    answer: Future[FilteredQuery]


class QueryReceiver:
    """Receives the finished queries of all replicas, passes each to the learner once, and then acknowledges it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._store, self._counts = replica.store, replica.queries
        self._offsets: dict[str, int] = {}  # last sequence number handed over, by sender
        self._waiting: deque[_Handed] = deque()

    def take_over(self) -> None:
        """Continue where the previous leader stopped. Raises StoreLost."""
        self._waiting.clear()
        for sender, offset in self._store.take_over().items():
            self._offsets[sender] = max(offset, self._offsets.get(sender, offset))

    def step(self) -> None:
        """Acknowledge observed queries, and hand over new ones. Raises StoreLost."""
        self._conclude()
        room = _MESSAGES_AT_ONCE - len(self._waiting)
        for entry in self._store.receive(room) if room else ():
            self._take(*entry)

    def _conclude(self) -> None:
        """Acknowledge observed queries, also those whose observation raised: it would raise again."""
        observed = list(takewhile(lambda one: one.answer.done() and not one.answer.cancelled(), self._waiting))
        if observed:
            self._store.acknowledge([one.entry_id for one in observed], {one.sender: one.sequence for one in observed})
            self._counts["observed"] += len(observed)
        for _ in observed:
            self._waiting.popleft()

    def _take(self, entry_id: bytes, message: QueryMessage | None) -> None:
        try:
            if message is None:
                raise Refused("misfit", "an entry of the stream is not a query")
            header, feedback = self._replica.codec.decode(message, self._replica.served.version_of)
        except Refused as refusal:
            if not self._counts[refusal.reason]:  # later ones are counted, not logged
                logger.warning("refusing a query of another replica: %s", refusal)
            self._drop(entry_id, refusal.reason)
            return
        if header.sequence <= self._offsets.get(header.sender, -1):
            self._drop(entry_id, "duplicate")
            return
        self._remember(header.sender, header.sequence)
        answer = self._replica.worker.ask(lambda: self._replica.learner.observe(feedback))
        self._waiting.append(_Handed(entry_id, header.sender, header.sequence, answer))

    def _drop(self, entry_id: bytes, outcome: str) -> None:
        self._counts[outcome] += 1
        self._store.acknowledge([entry_id], {})

    def _remember(self, sender: str, sequence: int) -> None:
        """Store the offset of a sender; the least recent senders are forgotten."""
        self._offsets.pop(sender, None)
        self._offsets[sender] = sequence
        if len(self._offsets) > _MAX_SENDERS:
            del self._offsets[next(iter(self._offsets))]


class Leader:
    """Announces versions under a lease, after it has adopted the version of the previous leader."""

    def __init__(self, replica: Replica, follower: Follower) -> None:
        self._replica = replica
        self._follower = follower
        self._receiver = QueryReceiver(replica)
        self._store, self._state, self._served = replica.store, replica.state, replica.served
        self._epoch = 0  # epoch of the present term; 0: none has begun
        self._sharing: Future[dict[str, JsonValue]] | None = None
        self._share_at = 0.0

    def step(self, epoch: int) -> None:
        """Announce, receive and share once, under a lease of this epoch. Raises StoreLost."""
        raw = self._store.current()
        if epoch != self._epoch:
            if not self._follower.settled(raw):
                return
            self._begin(epoch)
        served = self._served.now()
        if not self._is_announced(raw, served):
            self._announce(epoch, served)
        self._receiver.step()
        self._share(epoch)

    def _begin(self, epoch: int) -> None:
        self._receiver.take_over()
        shared = self._store.shared()
        if shared is not None:
            self._inherit(shared)
        self._epoch = epoch
        self._share_at = time.monotonic()

    def _inherit(self, raw: bytes) -> None:
        try:
            content = verify("state", raw, self._state.secret)
        except Refused as refusal:
            logger.warning("ignoring the shared state of the previous leader: %s", refusal)
            return
        if content.get("fingerprint") == self._state.fingerprint:
            self._replica.worker.ask(lambda: self._replica.learner.inherit(content))

    def _is_announced(self, raw: bytes | None, served: ServedVersion) -> bool:
        """Whether the store holds the served version, announced under this lease, and its weights. The store may have
        been emptied, or others may have written to it."""
        record = self._state.record
        return (
            (record.epoch, record.sha256) == (self._epoch, served.sha256)
            and raw == self._state.raw
            and self._store.has(record.sha256, record.num_bytes)
        )

    def _announce(self, epoch: int, served: ServedVersion) -> None:
        before = self._state.record.sha256 or served.sha256
        record = self._next_record(epoch, served)
        if not self._store.put(served.sha256, served.data, lambda: self._holds(epoch)):
            return
        self._state.accept(record, sign("version", record, self._state.secret))
        if self._store.announce(epoch, self._state.raw, served.sha256, before):
            self._replica.versions["announced"] += 1
            logger.info("announced version %s, weights %s", record.order, served.sha256[:16])

    def _holds(self, epoch: int) -> bool:
        """Renew the lease if due, since sending weights may take longer than it lasts. Returns whether it is held under
        this epoch."""
        lease = self._replica.lease
        return lease.hold(self._state.record.epoch) and lease.epoch == epoch

    def _next_record(self, epoch: int, served: ServedVersion) -> VersionRecord:
        """Return a new record, or the last one again if only the store was emptied."""
        known = self._state.record
        if (known.epoch, known.sha256) == (epoch, served.sha256):
            return known
        return VersionRecord(
            epoch=epoch,
            number=known.number + 1,
            sha256=served.sha256,
            parent=known.sha256,
            num_bytes=len(served.data),
            fingerprint=self._state.fingerprint,
            leader=self._replica.name,
            date=now(),
        )

    def _share(self, epoch: int) -> None:
        """Store the policy's state regularly, for the next leader."""
        if self._sharing is None and time.monotonic() >= self._share_at:
            self._sharing = self._replica.worker.ask(self._replica.learner.shared)
        if self._sharing is None or not self._sharing.done():
            return
        sharing, self._sharing = self._sharing, None
        self._share_at = time.monotonic() + _SHARE_SECONDS
        if not sharing.cancelled() and sharing.exception() is None:
            content = {**sharing.result(), "fingerprint": self._state.fingerprint}
            self._store.share(epoch, sign("state", content, self._state.secret))
