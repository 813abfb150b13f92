"""Policies of learning: which finished queries are learnt from, and when an update is due. `EveryBatch` asks no bandit:
it shows what deciding by gain is worth.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import JsonValue

Arm = Literal["head", "full"]
ARMS: tuple[Arm, ...] = ("head", "full")

Reason = Literal[
    "warm_up",  # too few queries to know how long one takes
    "not_admitted",  # the query must not be learnt from, or was not recorded
    "unusable",  # its numbers make no sense
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

    seconds: float  # of serving; what all queries' add up to is time
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
    """All calls come from the adaptation thread.

    An update begins with `take_update` and ends with `ended`; there is one at a time.
    """

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
        """Into which buffer a finished query goes. To be called for every query, in order."""
        ...

    def take_update(self) -> Arm | None:
        """The arm whose buffer is full and may be trained on now, if any; its update has begun with this call."""
        ...

    def ended(self, judgement: Judgement | None, seconds: float, *, published: bool) -> None:
        """The update has taken so much from serving. Without a judgement it says nothing of its arm."""
        ...

    def spent(self, seconds: float) -> None:
        """Something that is no update has taken so much from serving."""
        ...

    def traffic_changed(self) -> None:
        """Other texts are served: what arms gained is less sure."""
        ...

    def reset(self) -> None:
        """Other weights are served, and no update has made them; one under way is over."""
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
        self._num_waiting = 0
        self._training = False

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
        self._num_waiting += 1
        return Decision(self._arm, "fixed")

    def take_update(self) -> Arm | None:
        if self._training or self._num_waiting < self._batch_queries:
            return None
        self._num_waiting = 0
        self._training = True
        return self._arm

    def ended(self, judgement: Judgement | None, seconds: float, *, published: bool) -> None:
        assert self._training, "an update ends that never began"
        self._training = False

    def spent(self, seconds: float) -> None:
        """Nobody counts it."""

    def traffic_changed(self) -> None:
        """Batches come whatever the texts are."""

    def reset(self) -> None:
        self._num_waiting = 0
        self._training = False

    def state(self) -> State:
        return {"num_waiting": self._num_waiting}

    def restore(self, state: State) -> None:
        waiting = state.get("num_waiting")
        if set(state) != {"num_waiting"} or not isinstance(waiting, int) or waiting < 0:
            raise ValueError("not the state of a fixed policy")
        self.reset()
        self._num_waiting = waiting
