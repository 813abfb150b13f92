"""Traffic that answers to updates in known ways, and a clock that goes when it is told to."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from adaptation.policy import Arm, Policy, QueryReport


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """Tokens per cost rise with each update of an arm, up to a ceiling; an update takes its cost from one query."""

    gains: Mapping[Arm, float]
    costs: Mapping[Arm, float]
    ceiling: float
    throughput: float = 2.0

    def update(self, arm: Arm) -> float:
        self.throughput = min(self.ceiling, self.throughput + self.gains[arm])
        return self.costs[arm]


@dataclass
class Served:
    tokens: int = 0
    cost: float = 0.0
    updates: Counter[str] = field(default_factory=Counter)

    @property
    def net_throughput(self) -> float:
        return self.tokens / self.cost


def serve(policy: Policy, world: World, *, queries: int, rng: random.Random) -> Served:
    served = Served()
    training_cost = 0.0
    for _ in range(queries):
        cost = rng.uniform(15, 25)
        tokens = round(cost * world.throughput * rng.gauss(1.0, 0.02))
        served.tokens += tokens
        served.cost += cost + training_cost
        policy.decide(_report(tokens, cost, training_cost, rng.uniform(8, 16)))
        training_cost = 0.0
        arm = policy.take_update()
        if arm is not None:
            before = world.throughput
            training_cost = world.update(arm)
            served.updates[arm] += 1
            policy.published(world.throughput / before)
    return served


def _report(tokens: int, cost: float, training_cost: float, signal: float) -> QueryReport:
    return QueryReport(
        emitted_tokens=tokens, draft_cost=0.2 * cost, verify_cost=0.8 * cost, training_cost=training_cost, signal=signal
    )
