"""What adaptation did, what it looks like to an operator, and what can go wrong in it: records without torch."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal


class AdaptationError(Exception):
    """Base of every error of adaptation that the rest of the server outlives."""


class Damaged(AdaptationError):
    """A stored file is missing a part, was altered, or does not fit what it is loaded for."""


class NotRemoved(AdaptationError):
    """An old file could not be removed; what was to be stored is stored."""


class NotStored(AdaptationError):
    """A file could not be written, for want of space or permission; what was there before is still there."""


RefusalReason = Literal[
    "torn",  # a part is missing or was altered on its way
    "forged",  # not signed with the secret that replicas share
    "foreign",  # made for another model, drafter or type of weights
    "old",  # newer versions are known
    "fork",  # does not follow from the version before it
    "misfit",  # names, shapes or numbers that cannot be
    "not_finite",
]


class Refused(AdaptationError):
    """Something that came from outside this process and must not be used."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: RefusalReason = reason
        self.detail = detail


class TrainingLost(AdaptationError):
    """The process that trains ended before it had answered."""


class StoreLost(AdaptationError):
    """The shared store could not be reached, or did not answer in time."""


class StoreRefused(StoreLost):
    """The shared store answered with an error of its own: out of memory, no permission, an unknown group."""


EventKind = Literal[
    "solved",  # a drafter was made of what was collected, and is to be judged
    "published",  # an update is on its way to the engine
    "refused",  # the gate, or the disk, kept an update from being served
    "discarded",  # an update could not be computed
    "rolled_back",  # an alarm or an operator took the serving weights back
    "changed",  # the traffic is another than before: what was learnt about updates is tried anew
    "paused",
    "resumed",
    "loaded",  # an operator brought weights from a folder
    "restored",  # an earlier process's state was taken up, or could not be
    "failed",  # something broke; serving is as it was
    "not_stored",  # the disk did not take the state
]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, with the numbers behind it."""

    kind: EventKind
    version: int  # of the drafter that is served from here on
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    unix_seconds: float = field(default_factory=time.time, compare=False)


Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """This process among those that learn together. Counts are those of this process."""

    name: str = ""  # empty: it learns by itself, and asks nobody
    role: str = "alone"  # alone, following or leading
    connected: bool = False  # to the store that all share
    leader: str = ""  # who announced the version that all serve
    epoch: int = 0  # of that leader
    number: int = 0  # of that version
    announced_sha256: str = ""  # of the weights that all shall serve
    served_sha256: str = ""  # and of those that are served here, or on their way to be
    queries: Mapping[str, int] = field(default_factory=dict)  # by what became of them
    versions: Mapping[str, int] = field(default_factory=dict)  # by what became of them
    connections_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptationStatus:
    """Learning at one moment. Counts are those of this process."""

    policy: str
    paused: bool
    version: int  # of the drafter that serves
    origin: int  # the version that first had its weights; 0: as trained before deployment
    newest: int  # the highest version there was, staged or served
    condemned: tuple[int, ...]  # versions that are never gone back to
    snapshots: tuple[int, ...]  # versions that are kept
    values: Mapping[str, float]  # by arm, gain of throughput per unit of signal; empty: nobody estimates it
    phase: Literal["collecting", "learning"]  # collecting: what a drafter is to be made of
    collected_positions: int  # of texts, for that
    wanted_positions: int  # for the next attempt at making it; 0: nothing is made
    balance_seconds: float | None  # what learning may still lose; None: nobody counts it, or not yet
    waiting: Mapping[str, int]  # by arm, samples in its buffer
    validation_texts: int  # texts in the validation set
    queries_observed: int
    queries_dropped: int  # nobody had time for them
    queries_excluded: int  # must not be learnt from
    excluded: Mapping[str, int]  # the same by reason
    samples_dropped: int  # their buffer was full
    decisions: Mapping[str, int]  # by choice and reason, "head:gain"
    updates: Mapping[str, int]  # by arm, computed to their end
    publishes: int
    refusals: int
    rollbacks: int
    discards: int
    training_seconds: float  # that updates and their evaluation computed
    kl_to_anchor: float | None  # None: there are not yet texts enough to measure it on
    failures: Mapping[str, int]  # of the learning thread, by stage
    restarts: int  # of the learning thread
    events: tuple[Event, ...] = ()  # the last ones, oldest first
    replicas: ReplicaStatus = field(default_factory=ReplicaStatus)
