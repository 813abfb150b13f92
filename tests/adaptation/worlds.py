"""Traffic that answers to updates in known ways, and a clock that goes when it is asked to."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from adaptation.policy import _RECORDING_SHARE, ARMS, Arm, Bandit, Choice, Judgement, QueryReport


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Buffers:
    """Signals of the samples that wait for each arm, the newest few."""

    signals: dict[Arm, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})

    def decide(self, policy: Bandit, query: QueryReport) -> Choice:
        decision = policy.decide(query)
        if decision.arm is not None and query.signal is not None:
            self.signals[decision.arm] = [*self.signals[decision.arm], query.signal][-8:]
        return decision

    def take(self, policy: Bandit) -> tuple[Arm, float] | None:
        """The arm whose update is due, and the mean signal of what waited for it."""
        arm = policy.due(self.signals)
        if arm is None:
            return None
        signals, self.signals[arm] = self.signals[arm], []
        return arm, fmean(signals)


@dataclass
class World:
    """Queries of 20 seconds each, that an update of an arm makes shorter, down to a floor; it takes its seconds from
    serving. Replays tell what it gains with this error, and what gains more than they can err is published."""

    gains: Mapping[Arm, float]  # of throughput, of one update
    costs: Mapping[Arm, float]  # seconds
    floor: float = 10.0
    error: float = 0.02
    seconds: float = 20.0

    def judged(self, arm: Arm, rng: random.Random) -> tuple[Judgement, bool]:
        gain = min(self.gains[arm], self.seconds / self.floor - 1.0)
        seen, needed = rng.gauss(gain, self.error), 1.25 * self.error
        published = seen > needed
        if published:
            self.seconds /= 1.0 + gain
        return Judgement(seen, self.error, needed), published


@dataclass
class Served:
    seconds: float = 0.0  # of queries and updates
    plain_seconds: float = 0.0  # of the same queries without any update
    updates: Counter[str] = field(default_factory=Counter)
    recorded: int = 0

    @property
    def net_gain(self) -> float:
        return self.plain_seconds / self.seconds - 1.0


def serve(policy: Bandit, world: World, *, queries: int, rng: random.Random) -> Served:
    served, buffers, first = Served(), Buffers(), world.seconds
    for number in range(queries):
        luck = rng.uniform(0.75, 1.25)
        recorded = not policy.resting or number % 32 == 0
        served.recorded += recorded
        served.plain_seconds += luck * first
        seconds = luck * world.seconds * (1.0 + _RECORDING_SHARE if recorded else 1.0)
        served.seconds += seconds
        buffers.decide(policy, QueryReport(seconds, rng.uniform(8, 16) if recorded else None, recorded))
        taken = buffers.take(policy)
        if taken is not None:
            arm, signal = taken
            judgement, published = world.judged(arm, rng)
            policy.ended(arm, signal, judgement, world.costs[arm], published=published)
            served.seconds += world.costs[arm]
            served.updates[arm] += 1
    return served
