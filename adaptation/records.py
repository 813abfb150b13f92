"""Errors, events and status of adaptation. Imports no torch."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Result = TypeVar("Result")
_NUM_KEPT_EVENTS = 50


class AdaptationError(Exception):
    """Base of the errors of adaptation that do not stop the server."""


class Damaged(AdaptationError):
    """A stored file lacks a part, was altered, or does not fit the drafter."""


class NotRemoved(AdaptationError):
    """An old file could not be removed; the new file is stored."""


class NotStored(AdaptationError):
    """A file could not be written; earlier files are unchanged."""


RefusalReason = Literal[
    "torn",  # a part is missing or was altered on its way
    "forged",  # not signed with the secret that replicas share
    "foreign",  # made for another model, drafter or type of weights
    "old",  # newer versions are known
    "fork",  # does not follow from the version before it
    "misfit",  # impossible names, shapes or numbers
    "not_finite",
]


class Refused(AdaptationError):
    """Data from outside this process was refused for `reason`; it must not be used."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: RefusalReason = reason
        self.detail = detail


class TrainingLost(AdaptationError):
    """The training process ended before it answered."""


class StoreLost(AdaptationError):
    """The shared store could not be reached, or did not answer in time."""


class StoreRefused(StoreLost):
    """The shared store answered with an error of its own: out of memory, no permission, an unknown group."""


GateReason = Literal[
    "better", "too_little_evidence", "not_finite", "worse_than_serving", "worse_than_anchor", "within_noise"
]
"""Why the gate publishes or refuses a candidate."""
QuotaReason = Literal["admitted", "not_stored", "nothing_to_learn", "over_share", "resting"]
"""Why a query is admitted to learning or excluded from it."""
AlarmReason = Literal["not_finite", "worse_than_anchor", "worse_than_before"]
"""Why the monitor rolls the serving weights back."""
Outcome = Literal[
    "applied",
    "nothing_to_learn",
    "interrupted",
    "loss_not_finite",
    "gradient_not_finite",
    "optimizer_not_finite",
    "weights_not_finite",
]
"""Outcome of training an update: `applied`, or the reason why the update was discarded."""
Stage = Literal["observe", "update", "command", "recover", "save"]
"""Stage of the learning thread in which an exception arose."""
Role = Literal["alone", "following", "leading"]
"""Role of a replica among those that share a store."""

EventKind = Literal[
    "solved",  # a drafter was solved from the collected sums; the gate judges it next
    "published",  # an update is staged for the engine
    "refused",  # the gate refused an update, or the disk was full
    "discarded",  # an update was not completed
    "rolled_back",  # an alarm or an operator rolled the serving weights back
    "changed",  # the traffic changed, so the values of the arms are less certain
    "paused",
    "resumed",
    "loaded",  # weights from an operator or a leader were staged for serving
    "restored",  # the state of an earlier process was loaded, or a part of it was unusable
    "failed",  # an exception in learning; serving is unaffected
    "not_stored",  # the state could not be written
]


@dataclass(frozen=True, slots=True)
class Event:
    """A decision or failure of learning with its numbers, for logs, status and metrics."""

    kind: EventKind
    version: int  # latest version, served or staged, when the event occurred
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    unix_seconds: float = field(default_factory=time.time, compare=False)


Emit = Callable[[Event], None]


class EventLog:
    """Emits events, counts them by kind, and keeps the latest."""

    def __init__(self, emit: Emit, newest: Callable[[], int]) -> None:
        """`newest`: function that returns the latest served or staged version."""
        self.counts: Counter[EventKind] = Counter()
        self.latest: deque[Event] = deque(maxlen=_NUM_KEPT_EVENTS)
        self._emit = emit
        self._newest = newest

    def add(self, kind: EventKind, reason: str, numbers: Mapping[str, float] | None = None) -> None:
        """Record and emit an event."""
        event = Event(kind, self._newest(), reason, numbers or {})
        self.counts[kind] += 1
        self.latest.append(event)
        self._emit(event)

    def storing(self, store: Callable[[], Result]) -> Result | None:
        """Call a function that writes to disk and return its result. If it raises AdaptationError, add an event and
        return None."""
        try:
            return store()
        except AdaptationError as error:
            self.add("not_stored", str(error))
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """Status of this replica among all that share a store. Counts begin with this process."""

    name: str = ""  # empty: there is no shared store
    role: str = "alone"  # alone, following or leading
    connected: bool = False  # whether the shared store answers
    leader: str = ""  # name of the replica that announced the current version
    epoch: int = 0  # the leader's epoch
    number: int = 0  # number of the announced version within its epoch
    announced_sha256: str = ""  # hash of the announced weights
    served_sha256: str = ""  # hash of the weights served or staged here
    queries: Mapping[str, int] = field(default_factory=dict)  # counts by outcome
    versions: Mapping[str, int] = field(default_factory=dict)  # counts by outcome
    connections_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptationStatus:
    """Status of learning. Counts begin with this process."""

    policy: str
    paused: bool
    version: int  # served version
    origin: int  # version that first had the served weights; 0: the deployed drafter
    newest: int  # the version that serves or is staged
    condemned: tuple[int, ...]  # versions excluded from restores
    snapshots: tuple[int, ...]  # versions stored on disk
    values: Mapping[str, float]  # gain of throughput per unit of signal, by arm; empty: the policy never learns
    phase: Literal["collecting", "learning"]  # collecting: sums for solving a drafter
    collected_positions: int  # text positions in the sums
    wanted_positions: int  # positions that the next solution needs; 0: there will be none
    balance_seconds: float | None  # serving time that learning may still take; None: the ledger is not opened yet
    waiting: Mapping[str, int]  # buffered samples by arm
    validation_texts: int  # texts in the validation set
    queries_observed: int
    queries_dropped: int  # queries lost to a full queue
    queries_excluded: int  # queries not admitted to learning
    excluded: Mapping[str, int]  # excluded queries by reason
    samples_dropped: int  # samples lost to a full buffer
    decisions: Mapping[str, int]  # counts by choice and reason, such as "head:gain"
    updates: Mapping[str, int]  # completed updates by arm
    publishes: int
    refusals: int
    rollbacks: int
    discards: int
    training_seconds: float  # seconds of updates and their evaluation
    kl_to_anchor: float | None  # in nats; None: not enough texts yet
    predicted_gain: float = 0.0  # sum of the judge's relative gains of all publishes, rolled back ones included
    served_tau: float | None = None  # tokens per verify of the served version, as served; None: no query yet
    failures: Mapping[str, int]  # exceptions in the learning thread by stage
    restarts: int  # replaced learning threads
    reason: str = "on"  # why learning is on, and whether it waits for idle time
    events: tuple[Event, ...] = ()  # latest events, oldest first
    replicas: ReplicaStatus = field(default_factory=ReplicaStatus)
