"""What an operator sees of learning while serving, as plain records: no torch, so that anybody may hold them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PastEvent:
    """One of the last things that happened."""

    unix_seconds: float
    kind: str  # one of EventKind
    version: int  # of the drafter that is served from there on
    reason: str
    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """This process among those that learn together. Counts are those of this process."""

    name: str = ""  # empty: it learns by itself, and asks nobody
    standing: str = "alone"  # alone, following or leading
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
    exchanged_tokens: int  # that it can propose, and could not as deployed
    newest: int  # the highest version there was, staged or served
    condemned: tuple[int, ...]  # versions that are never gone back to
    snapshots: tuple[int, ...]  # versions that are kept
    collapsed: bool  # drafting earns nothing now
    values: Mapping[str, float]  # by arm, gain of throughput per unit of signal; empty: nobody estimates it
    waiting: Mapping[str, int]  # by arm, lessons in its buffer
    held_back: int  # texts that judge
    queries_heard: int
    queries_dropped: int  # nobody had time for them
    queries_excluded: int  # must not be learnt from
    excluded: Mapping[str, int]  # the same by reason
    lessons_dropped: int  # their buffer was full
    decisions: Mapping[str, int]  # by choice and reason, "head:gain"
    updates: Mapping[str, int]  # by arm, computed to their end
    publishes: int
    refusals: int
    rollbacks: int
    discards: int
    training_seconds: float  # that updates and their judging computed
    kl_to_anchor: float | None  # None: there are not yet texts enough to measure it on
    failures: Mapping[str, int]  # of the learning thread, by stage
    restarts: int  # of the learning thread
    events: tuple[PastEvent, ...] = field(default=())  # the last ones, oldest first
    replicas: ReplicaStatus = field(default_factory=ReplicaStatus)
