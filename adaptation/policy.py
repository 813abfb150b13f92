"""What decides about updates, as one protocol: who asks, what a decision says, what a query reports about itself.

Throughput is emitted tokens per cost. Costs are normalised: seconds divided by what the cost table predicts for the
same load, so that a busier hour is not mistaken for a worse drafter. Knows neither tensors nor how one trains.
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
    "blocked",  # an update has just ended
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
    predicted_gains: Mapping[Arm, float]

    @property
    def choice(self) -> Literal["skip", "head", "full"]:
        return "skip" if self.arm is None else self.arm


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What an update was worth."""

    arm: Arm
    published: bool
    signal: float  # mean signal of the queries it learnt from
    before: float  # throughput
    after: float  # throughput, its training included
    counted: bool  # False: too little signal to say anything about the arm

    @property
    def gain(self) -> float:
        return self.after - self.before


class Policy(Protocol):
    """All calls come from the adaptation thread.

    An update begins with `take_update` and ends with `published` or `discarded`; there is one at a time.
    """

    @property
    def values(self) -> Mapping[Arm, float]:
        """Gain of throughput per unit of signal that each arm is believed to bring; empty when nobody estimates it."""
        ...

    @property
    def last_measurement(self) -> Measurement | None: ...

    @property
    def resting(self) -> bool:
        """Whether nothing promises a gain, so that queries are learnt from by chance or not at all."""
        ...

    def decide(self, query: QueryReport) -> Decision:
        """Hear of a finished query and say into which buffer it goes. To be called for every query, in order."""
        ...

    def take_update(self) -> Arm | None:
        """The arm whose buffer is full and may be trained on now, if any; its update has begun with this call."""
        ...

    def published(self, tau_ratio: float | None = None) -> None:
        """The update reached the serving copy. With the ratio of replayed tau, new to old, less what may be luck, its
        gain is known at once; without, it is measured on the queries that follow."""
        ...

    def discarded(self, *, counted: bool = True) -> None:
        """The update failed or was refused: it cost time and changed nothing of what is served. Not `counted`, it says
        nothing of its arm: further ones may make of it what shall be served."""
        ...

    def traffic_changed(self) -> None:
        """Texts are not what they were: what could not be gained before may be now."""
        ...

    def reset(self) -> None:
        """Forget everything learnt: the drafter it was learnt about is no longer served.

        An update under way is forgotten too, and must then not be ended.
        """
        ...

    def state(self) -> State: ...

    def restore(self, state: State) -> None:
        """Go on from a saved state. An update that was being trained is lost with its process.

        Raises ValueError for a state that is not one, and then changes nothing.
        """
        ...
