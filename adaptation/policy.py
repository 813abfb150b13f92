"""Policies of learning: which finished queries are learnt from, and when an update is due.

Throughput is emitted tokens per cost. Costs are seconds divided by what the cost table predicts for the same load, so
that a busier hour is not mistaken for a worse drafter. `EveryBatch` asks no bandit: it shows what deciding by gain is
worth.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import JsonValue

Arm = Literal["head", "full"]
ARMS: tuple[Arm, ...] = ("head", "full")

Reason = Literal[
    "warm_up",  # too few queries for a baseline
    "not_admitted",  # the query must not be learnt from
    "unusable",  # its numbers make no sense
    "untried",  # too little is known of the arm
    "explore",  # drawn by chance
    "gain",  # the larger predicted gain
    "no_gain",  # no arm promises any
    "fixed",  # the policy always says so
    "never",  # the policy never learns
]

State = dict[str, JsonValue]
"""Whatever an object needs to go on exactly where it stopped, as plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryReport:
    """One query at its end."""

    emitted_tokens: int
    draft_cost: float
    verify_cost: float
    training_cost: float  # what updates took from this query's steps
    signal: float | None  # s, the sum of (1 - r) over its rejected positions; None: it must not be learnt from

    @property
    def usable(self) -> bool:
        costs = (self.draft_cost, self.verify_cost, self.training_cost)
        return (
            all(math.isfinite(cost) and cost >= 0 for cost in costs)
            and self.serving_cost > 0
            and self.emitted_tokens >= 0
            and (self.signal is None or (math.isfinite(self.signal) and self.signal >= 0))
        )

    @property
    def serving_cost(self) -> float:
        return self.draft_cost + self.verify_cost


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

    An update begins with `take_update` and ends with `published` or `discarded`; there is one at a time.
    """

    @property
    def values(self) -> Mapping[Arm, float]:
        """Gain of throughput per unit of signal that each arm is believed to bring; empty when nobody estimates it."""
        ...

    @property
    def resting(self) -> bool:
        """Whether nothing promises a gain, so that queries are learnt from by chance or not at all."""
        ...

    def decide(self, query: QueryReport) -> Decision:
        """Into which buffer a finished query goes. To be called for every query, in order."""
        ...

    def take_update(self) -> Arm | None:
        """The arm whose buffer is full and may be trained on now, if any; its update has begun with this call."""
        ...

    def published(self, tau_ratio: float) -> None:
        """`tau_ratio`: replayed tau of the new weights to that of the old, less what may be luck."""
        ...

    def discarded(self, *, counted: bool = True) -> None:
        """The update failed or was refused. Not `counted`, it says nothing of its arm: further ones may make of it what
        shall be served."""
        ...

    def traffic_changed(self) -> None: ...

    def reset(self) -> None:
        """Forget everything learnt, an update under way too: the drafter it was about is no longer served."""
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

    def published(self, tau_ratio: float) -> None:
        assert self._training, "an update ends that never began"
        self._training = False

    def discarded(self, *, counted: bool = True) -> None:
        assert self._training, "an update ends that never began"
        self._training = False

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
