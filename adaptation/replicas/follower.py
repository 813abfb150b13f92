"""The follower's part of a replica: it serves the version that the leader announced, and sends the queries that finish
here to the leader.

Also holds what leader and follower share: the newest accepted version, and the weights served here.
"""

import hashlib
import logging
import time
from collections import Counter, deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from adaptation.learner import Learner
from adaptation.records import Refused, StoreRefused
from adaptation.replicas.redis_store import Lease, QueryMessage, RedisStore
from adaptation.replicas.wire import QueryCodec, Secret, VersionRecord, weights_from_bytes, weights_to_bytes
from adaptation.weights import DrafterWeights
from adaptation.worker import Worker
from drafters.feedback import QueryFeedback

logger = logging.getLogger(__name__)

_MAX_QUERY_BYTES: Final = 16 << 20
_MESSAGES_AT_ONCE: Final = 8  # queries sent per step
_REFUSED_SECONDS: Final = 2.0  # pause before a refused version is checked again
_REMEMBERED_VERSIONS: Final = 256

UNKNOWN: Final = VersionRecord(
    epoch=0, number=-1, sha256="", parent="", num_bytes=0, fingerprint="", leader="", date=""
)
"""The record before any announcement; it is older than every version."""


class VersionState:
    """Holds the newest version accepted or announced here, and refuses versions that do not follow it."""

    def __init__(self, fingerprint: str, num_bytes: int, secret: Secret) -> None:
        """`num_bytes`: size of all weights of this fingerprint."""
        self.fingerprint = fingerprint
        self.secret = secret
        self.record = UNKNOWN
        self.raw = b""  # the record as stored
        self._num_bytes = num_bytes

    def check(self, raw: bytes) -> VersionRecord:
        """Decode a stored record and check that it may be followed. Raises Refused."""
        record, known = VersionRecord.decode(raw, self.secret), self.record
        if record.fingerprint != self.fingerprint:
            raise Refused("foreign", f"fingerprint {record.fingerprint[:16]}, not {self.fingerprint[:16]}")
        if record.num_bytes != self._num_bytes:
            raise Refused("misfit", f"{record.num_bytes} bytes of weights, not {self._num_bytes}")
        if raw == self.raw:
            return record
        if record.order < known.order:
            raise Refused("old", f"version {record.order} is older than the known version {known.order}")
        if record.order == known.order:
            raise Refused("fork", f"version {record.order} is already known with different content")
        follows = record.epoch == known.epoch and record.number == known.number + 1
        if follows and record.parent != known.sha256:
            raise Refused("fork", f"version {record.order} does not follow from the one before it")
        return record

    def accept(self, record: VersionRecord, raw: bytes) -> None:
        """Record this as the newest version."""
        self.record, self.raw = record, raw


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """Weights that this process serves, encoded, with this process's version number."""

    version: int
    sha256: str
    data: bytes


class ServedWeights:
    """Hashes the served weights, once per version. Called by one thread."""

    def __init__(self, weights: DrafterWeights) -> None:
        self._weights = weights
        self._hashes: dict[int, str] = {}
        self.last_seen = self._look()  # result of the last `now`, readable from any thread

    def now(self) -> ServedVersion:
        """Return the weights that are served or staged."""
        if self._weights.latest.version != self.last_seen.version:
            self.last_seen = self._look()
        return self.last_seen

    def sha256_of(self, version: int) -> str:
        """Return the SHA-256 of a version's weights, or an empty string if the version is unknown or too old."""
        return self._hashes.get(version, "")

    def version_of(self, sha256: str) -> int:
        """Return the served version if it has these weights, else -1."""
        return self.last_seen.version if sha256 == self.last_seen.sha256 else -1

    def _look(self) -> ServedVersion:
        latest = self._weights.latest
        data = weights_to_bytes(latest.weights)
        served = ServedVersion(latest.version, hashlib.sha256(data).hexdigest(), data)
        self._hashes[latest.version] = served.sha256
        for old in sorted(self._hashes)[:-_REMEMBERED_VERSIONS]:
            del self._hashes[old]
        return served


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """This replica's state and connections, which its leader and follower parts share."""

    name: str  # shown to other replicas; `store.name` is unique per start
    store: RedisStore
    lease: Lease
    codec: QueryCodec
    state: VersionState
    served: ServedWeights
    learner: Learner
    worker: Worker
    queries: Counter[str] = field(default_factory=Counter)  # queries by outcome
    versions: Counter[str] = field(default_factory=lambda: Counter(announced=0))  # versions by outcome


@dataclass(frozen=True, slots=True)
class _Adopting:
    """A version that the learner's thread is about to adopt."""

    record: VersionRecord
    raw: bytes
    answer: Future[int]


class Follower:
    """Follows the announced version. All calls come from the thread that talks to the store."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._store, self._state, self._served = replica.store, replica.state, replica.served
        self._adopting: _Adopting | None = None
        self._refused = b""
        self._again_at = 0.0

    def step(self) -> None:
        """Take one step towards serving the announced version. Raises StoreLost."""
        raw = self._store.current()
        if raw is None:
            self._reinstate()
        elif self.settled(raw) and raw == self._state.raw and self._diverged(raw):
            self._follow(raw)

    def settled(self, raw: bytes | None) -> bool:
        """Take a step towards the announced version unless it is followed already. Returns whether it is followed or
        refused. Raises StoreLost."""
        if self._adopting is not None:
            return self._adopted(self._adopting)
        if raw is None or raw == self._state.raw or self._is_put_off(raw):
            return True
        self._follow(raw)
        return self._adopting is None

    def _diverged(self, raw: bytes) -> bool:
        """Whether the served weights differ from the followed version: learnt while alone, or set by an operator."""
        return self._served.now().sha256 != self._state.record.sha256 and not self._is_put_off(raw)

    def _is_put_off(self, raw: bytes) -> bool:
        return raw == self._refused and time.monotonic() < self._again_at

    def _follow(self, raw: bytes) -> None:
        learner = self._replica.learner
        try:
            record = self._state.check(raw)
            if record.sha256 == self._served.now().sha256:
                self._state.accept(record, raw)
            else:
                weights = self._fetch(record)
                answer = self._replica.worker.ask(lambda: learner.adopt(weights, "leader"))
                self._adopting = _Adopting(record, raw, answer)
        except Refused as refusal:
            self._put_off(raw, refusal.reason, str(refusal))
            if refusal.reason in ("old", "fork"):  # a leader with an older state has to lead again under a higher epoch
                self._replica.lease.raise_epoch(self._state.record.epoch + 1)

    def _fetch(self, record: VersionRecord) -> dict[str, Tensor]:
        data, layout = self._store.get(record.sha256, record.num_bytes), self._replica.learner.weights.layout
        try:
            return weights_from_bytes(data, record.sha256, layout, self._replica.codec.shape.vocab)
        except Refused as refusal:
            if refusal.reason == "torn":
                self._store.remove(record.sha256)
            raise

    def _adopted(self, adopting: _Adopting) -> bool:
        if not adopting.answer.done():
            return False
        self._adopting = None
        if adopting.answer.cancelled():
            return True  # this process is ending
        error = adopting.answer.exception()
        if error is not None:
            self._put_off(adopting.raw, "not_served", str(error))
            return True
        self._state.accept(adopting.record, adopting.raw)
        self._replica.versions["followed"] += 1
        logger.info("following %s: version %s", adopting.record.leader, adopting.record.order)
        return True

    def _put_off(self, raw: bytes, outcome: str, detail: str) -> None:
        """Refuse a version for a while, because it may be repaired meanwhile."""
        if raw != self._refused:
            self._replica.versions[outcome] += 1
            logger.warning("not following an announced version: %s", detail)
        self._refused, self._again_at = raw, time.monotonic() + _REFUSED_SECONDS

    def _reinstate(self) -> None:
        """Restore the version in a store that was emptied, if it is still served here."""
        record, served = self._state.record, self._served.now()
        if record is UNKNOWN:
            return
        self._replica.lease.raise_epoch(record.epoch)
        if record.sha256 == served.sha256:
            self._store.put(record.sha256, served.data)
            self._store.reinstate(self._state.raw, record.sha256)


class QuerySender:
    """Bounded queue of queries for the leader, sent under consecutive numbers.

    A message whose sending failed is sent again under the same number, so that the leader recognises duplicates. The
    engine's thread calls `offer`; the thread that talks to the store calls everything else.
    """

    def __init__(self, replica: Replica, *, max_queries: int) -> None:
        self._replica = replica
        self._counts = replica.queries
        self._sequence = 0
        self._waiting: deque[QueryFeedback] = deque(maxlen=max_queries)
        self._unsent: QueryMessage | None = None

    def offer(self, feedback: QueryFeedback) -> None:
        """Queue a query; if the queue is full, the oldest is dropped. A query with `store: false` does not leave this
        process."""
        if not feedback.query.store:
            self._counts["not_stored"] += 1
            return
        if len(self._waiting) == self._waiting.maxlen:
            self._counts["queue_full"] += 1
        self._waiting.append(feedback)

    def forget(self, scope: str | None) -> None:
        """Drop the queued queries of a scope, or all; one whose sending has begun is the leader's. Called by the
        engine's thread."""
        for _ in range(len(self._waiting)):
            with suppress(IndexError):  # the rest was sent meanwhile
                feedback = self._waiting.popleft()
                if scope not in (None, feedback.query.scope):
                    self._waiting.append(feedback)

    def send(self) -> None:
        """Send up to 8 queued queries. Raises StoreLost, and then the next call sends the failed one again."""
        for _ in range(_MESSAGES_AT_ONCE):
            self._unsent = self._unsent or self._next()
            if self._unsent is None:
                return
            try:
                self._replica.store.send(self._unsent)
                self._counts["sent"] += 1
            except StoreRefused as error:
                logger.warning("Redis refused a query, which is dropped: %s", error)
                self._counts["store_refused"] += 1
            self._unsent = None

    def hand_over(self) -> None:
        """Pass the queue to this process's learner, because this replica no longer follows."""
        while self._waiting:
            self._replica.worker.offer(self._waiting.popleft())

    def _next(self) -> QueryMessage | None:
        served = self._replica.served
        while self._waiting:
            feedback = self._waiting.popleft()
            self._sequence += 1
            try:
                message = self._replica.codec.encode(
                    feedback,
                    sender=self._replica.store.name,
                    sequence=self._sequence,
                    first_weights=served.sha256_of(feedback.query.first_version),
                    weights=served.sha256_of(feedback.query.version),
                )
            except ValueError:
                self._counts["unusable"] += 1
                continue
            if message.num_bytes <= _MAX_QUERY_BYTES:
                return message
            self._counts["too_large"] += 1
        return None
