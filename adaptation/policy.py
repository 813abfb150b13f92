"""Policies of learning: which finished queries are learnt from, and when an update is due. `EveryBatch` asks no bandit:
it shows what deciding by gain is worth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import JsonValue

Arm = Literal["head", "full"]
ARMS: tuple[Arm, ...] = ("head", "full")

Reason = Literal[
    "warm_up",  # too few queries to know how long one takes
    "not_admitted",  # the query must not be learnt from, or was not recorded
    "unusable",  # its numbers make no sense, or no step decoded for it
    "explore",  # an arm may gain, or is drawn by chance
    "gain",  # an arm is believed to gain
    "no_gain",  # no arm is
    "not_covered",  # one might, but the ledger has nothing left to find out with
    "fixed",  # the policy always says so
    "never",  # the policy never learns
]

State = dict[str, JsonValue]
"""Whatever an object needs to go on exactly where it stopped, as plain values."""


@dataclass(frozen=True, slots=True)
class QueryReport:
    """One query at its end."""

    seconds: float  # of decoding, as in `Query`
    signal: float | None  # s, the sum of (1 - r) over its rejected positions; None: it is not learnt from
    recorded: bool = True
    drafted: bool = True  # blocks were drafted for it; without states of theirs it teaches no head

    @property
    def usable(self) -> bool:
        seconds_count = math.isfinite(self.seconds) and self.seconds > 0
        return seconds_count and (self.signal is None or (math.isfinite(self.signal) and self.signal >= 0))


@dataclass(frozen=True, slots=True)
class Judgement:
    """What an update made of the drafter, by replays of the same texts; relative to what it serves."""

    gain: float  # of emitted tokens per verify; less than 0: a loss
    error: float  # standard error of what the update itself gained
    needed: float = 0.0  # what may be luck: of many candidates the lucky ones are published
    before: float = 0.0  # what the same candidate had gained before the update, by earlier ones that were refused

    def __post_init__(self) -> None:
        numbers = self.gain, self.error, self.needed, self.before
        assert all(map(math.isfinite, numbers)), "a judgement that is none"


@dataclass(frozen=True, slots=True)
class Decision:
    """Into which arm's buffer a query goes, and why."""

    arm: Arm | None  # None: skip
    reason: Reason

    @property
    def choice(self) -> Literal["skip", "head", "full"]:
        return "skip" if self.arm is None else self.arm


class Policy(Protocol):
    """All calls come from the adaptation thread."""

    @property
    def values(self) -> Mapping[Arm, float]:
        """Gain of throughput per unit of signal that each arm is believed to bring; empty when nobody estimates it."""
        ...

    @property
    def resting(self) -> bool:
        """Whether nothing promises a gain that the ledger would cover finding out."""
        ...

    def covers(self, seconds: float) -> bool:
        """Whether training may take so much from serving, and not been charged for it yet."""
        ...

    def decide(self, query: QueryReport) -> Decision:
        """Into which arm's buffer a finished query goes. To be called for every query, in order."""
        ...

    def due(self, signals: Mapping[Arm, Sequence[float]]) -> Arm | None:
        """The arm whose buffer is full and whose update may be afforded now, if any. `signals`: of the samples in each
        arm's buffer."""
        ...

    def ended(self, arm: Arm, signal: float, judgement: Judgement, seconds: float, *, published: bool) -> None:
        """An update on queries of this mean signal was judged, and took so many seconds from serving."""
        ...

    def spent(self, seconds: float) -> None:
        """Anything else took so many seconds from serving, be it an update that was interrupted or could not be judged:
        it says nothing of its arm."""
        ...

    def traffic_changed(self) -> None:
        """Other texts are served, or weights that no update has made: what arms gained is less sure."""
        ...

    def state(self) -> State: ...

    def restore(self, state: State) -> None:
        """Go on from a saved state, without the update that was being trained. Raises ValueError for a state that is
        not one, and then changes nothing."""
        ...


class EveryBatch:
    """One kind of update, again and again, whenever so many queries have come together; none at all without an arm.

    With full updates of 8 queries it is the schedule of Online Speculative Decoding (arXiv 2310.07177).
    """

    def __init__(self, arm: Arm | None, batch_queries: int = 1) -> None:
        self._arm: Arm | None = arm
        self._batch_queries = batch_queries

    @property
    def values(self) -> Mapping[Arm, float]:
        return {}

    @property
    def resting(self) -> bool:
        return self._arm is None

    def covers(self, seconds: float) -> bool:
        return True

    def decide(self, query: QueryReport) -> Decision:
        if self._arm is None:
            return Decision(None, "never")
        if not query.usable:
            return Decision(None, "unusable")
        if query.signal is None:
            return Decision(None, "not_admitted")
        return Decision(self._arm, "fixed")

    def due(self, signals: Mapping[Arm, Sequence[float]]) -> Arm | None:
        return self._arm if self._arm is not None and len(signals[self._arm]) >= self._batch_queries else None

    def ended(self, arm: Arm, signal: float, judgement: Judgement, seconds: float, *, published: bool) -> None:
        """No-op: batches come whatever updates gain."""

    def spent(self, seconds: float) -> None:
        """No-op: whatever they cost."""

    def traffic_changed(self) -> None:
        """No-op: and whatever the texts are."""

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        if state:
            raise ValueError("not the state of a fixed policy, which has none")
