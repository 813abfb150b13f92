"""The cost-aware bandit (SpecBlock section 3.4, algorithm 1): learns which kind of update is worth its time.

An arm's value is the gain of throughput per unit of signal; an update on queries of mean signal s is worth, in queries,

    s * value * horizon - cost

over the queries that it shall have paid for itself in. The value is a posterior: replays are noisy, and say how much.
Whatever is tried is paid for from a ledger, so that where nothing is gained its loss is bounded.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import cast

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, TypeAdapter

from adaptation.config import AdaptationConfig, PolicyName, Tuning
from adaptation.policy import ARMS, Arm, Decision, EveryBatch, Judgement, Policy, QueryReport, State
from drafters.regret import GainPosterior, RegretLedger

LEARNING = "learning"
"""The account of all that learning costs."""

_PRESUMED_GAIN = 0.05
"""Deviation of what an update on a typical batch gains, before anything is known: one in three changes tau by more."""
_LEAST_ERROR = 0.01  # of a gain: a few texts tell no less, be they all alike
_RECORDING_SHARE = 0.02  # of a query's seconds, that recording it takes


@dataclass(frozen=True, slots=True, kw_only=True)
class BanditRules:
    """The numbers of algorithm 1, and of the ledger."""

    batch_queries: Mapping[Arm, int]  # size of each arm's buffer
    alpha: float  # least weight of a new measurement
    epsilon: tuple[float, float]  # at first, and from the end of the cold start on
    s_min: float
    warm_up_queries: int = 10  # before the first decision; a mean query is that of the last so many
    cold_start_events: int = 8  # updates over which epsilon falls
    horizon_queries: int = 200  # in which an update shall have paid for itself
    cap_queries: float = 8.0  # what learning may lose at once, in queries' serving time


@dataclass
class _Belief:
    """What is known of an arm."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    mean: float = 0.0  # gain per unit of signal
    sd: NonNegativeFloat | None = None  # None: nothing is known
    cost: NonNegativeFloat = 0.0  # queries
    num_updates: NonNegativeInt = 0


@dataclass
class _Knowledge:
    """All that the bandit carries from one process to the next, beside its random source."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    num_queries: NonNegativeInt = 0
    num_events: NonNegativeInt = 0
    seconds: list[NonNegativeFloat] = field(default_factory=list)  # of the last N queries
    signal: NonNegativeFloat = 0.0  # a typical query's
    balance: float | None = None  # of the ledger, in seconds; None: before it is opened
    arms: dict[Arm, _Belief] = field(default_factory=lambda: {arm: _Belief() for arm in ARMS})


_RandomState = tuple[int, tuple[int, ...], float | None]
_KNOWLEDGE = TypeAdapter(_Knowledge)
_RANDOM = TypeAdapter(_RandomState)


class Bandit:
    """A `Policy`."""

    def __init__(self, rules: BanditRules, ledger: RegretLedger, *, rng: random.Random) -> None:
        """`ledger`: has its account once it is known how long queries take."""
        self._rules = rules
        self._ledger = ledger
        self._rng = rng
        self._now = _Knowledge()
        self._posteriors: dict[Arm, GainPosterior] = {}

    @property
    def values(self) -> Mapping[Arm, float]:
        return {arm: belief.mean for arm, belief in self._now.arms.items()}

    @property
    def _is_warm(self) -> bool:
        return LEARNING in self._ledger.balances and bool(self._now.seconds)

    @property
    def resting(self) -> bool:
        return self._is_warm and self._promising(ARMS) is None

    @property
    def epsilon(self) -> float:
        """Share of the queries learnt from that explore: falls with every judged update of the cold start."""
        first, last = self._rules.epsilon
        return first + (last - first) * min(1.0, self._now.num_events / self._rules.cold_start_events)

    def covers(self, seconds: float) -> bool:
        return not self._is_warm or self._ledger.balances[LEARNING] > seconds

    def decide(self, query: QueryReport) -> Decision:
        if not query.usable:
            return Decision(None, "unusable")
        self._observe(query)
        if not self._is_warm:
            return Decision(None, "warm_up")
        if query.signal is None:
            return Decision(None, "not_admitted")
        arms: Sequence[Arm] = ARMS if query.drafted else ("full",)
        arm = self._choose(arms)
        if arm is None:
            return Decision(None, "not_covered" if self._promising(arms, covered=False) else "no_gain")
        return Decision(arm, "gain" if self._worth(arm, self._now.arms[arm].mean) > 0 else "explore")

    def due(self, signals: Mapping[Arm, Sequence[float]]) -> Arm | None:
        if not self._is_warm:
            return None
        full = [arm for arm in ARMS if len(signals[arm]) >= self._rules.batch_queries[arm] and self._is_covered(arm)]
        return max(full, key=self._best_worth, default=None)

    def ended(self, arm: Arm, signal: float, judgement: Judgement, seconds: float, *, published: bool) -> None:
        belief, rules = self._now.arms[arm], self._rules
        mean_seconds = fmean(self._now.seconds)
        belief.num_updates += 1
        self._now.num_events += 1
        rate = max(rules.alpha, 1.0 / belief.num_updates)
        belief.cost += rate * (seconds / mean_seconds - belief.cost)
        if signal > 0 and signal >= rules.s_min:
            posterior = self._posterior(arm)
            gain = judgement.gain - judgement.before
            posterior.observe(gain / signal, noise=max(judgement.error, _LEAST_ERROR) / signal)
            belief.mean, belief.sd = posterior.mean, posterior.sd
        gained = 0.0
        if published:  # of many candidates the lucky ones are: what is sure of the arm counts
            gained = max(0.0, min(judgement.gain - judgement.needed, self._posterior(arm).worst_case * signal))
        self._ledger.raise_cap(LEARNING, seconds)
        self._ledger.record(LEARNING, gained * rules.horizon_queries * mean_seconds - seconds)

    def spent(self, seconds: float) -> None:
        if self._is_warm:
            self._ledger.raise_cap(LEARNING, seconds)
            self._ledger.record(LEARNING, -seconds)

    def traffic_changed(self) -> None:
        for arm, posterior in self._posteriors.items():
            posterior.widen()
            self._now.arms[arm].sd = posterior.sd

    def state(self) -> State:
        version, words, gauss = cast(_RandomState, self._rng.getstate())
        self._now.balance = self._ledger.balances.get(LEARNING)
        return {"knowledge": _KNOWLEDGE.dump_python(self._now, mode="json"), "random": [version, list(words), gauss]}

    def restore(self, state: State) -> None:
        if set(state) != {"knowledge", "random"}:
            raise ValueError("not the state of a bandit")
        now = _KNOWLEDGE.validate_python(state["knowledge"])
        if set(now.arms) != set(ARMS) or (now.balance is not None and not any(now.seconds)):
            raise ValueError("the state of a bandit with other arms, or without the time that queries take")
        self._rng.setstate(_RANDOM.validate_python(state["random"]))
        self._now, self._posteriors = now, {}
        if now.balance is not None:
            self._open(now.balance)

    def _observe(self, query: QueryReport) -> None:
        """Count a query, its time and what it took to record it."""
        now, rules = self._now, self._rules
        now.num_queries += 1
        now.seconds = [*now.seconds, query.seconds][-rules.warm_up_queries :]
        if query.signal:
            now.signal += (query.signal - now.signal) * (rules.alpha if now.signal else 1.0)
        if self._is_warm:
            self._ledger.record(LEARNING, -_RECORDING_SHARE * query.seconds * query.recorded)
        elif now.num_queries > rules.warm_up_queries:
            self._open()

    def _open(self, balance: float | None = None) -> None:
        self._ledger.open(LEARNING, self._rules.cap_queries * fmean(self._now.seconds), balance)

    def _choose(self, arms: Sequence[Arm]) -> Arm | None:
        """The arm that a query goes to: with probability `epsilon` the one of these tried least, else the one that may
        gain most. None where the ledger does not cover it, or no arm may gain."""
        if self._rng.random() < self.epsilon:
            arm = min(arms, key=lambda arm: self._now.arms[arm].num_updates)
            return arm if self._is_covered(arm) else None
        return self._promising(arms)

    def _promising(self, arms: Sequence[Arm], *, covered: bool = True) -> Arm | None:
        """The arm that may gain most, if any may."""
        able = [arm for arm in arms if not covered or self._is_covered(arm)]
        best = max(able, key=self._best_worth, default=None)
        return best if best is not None and self._best_worth(best) > 0 else None

    def _best_worth(self, arm: Arm) -> float:
        return self._worth(arm, self._posterior(arm).best_case)

    def _worth(self, arm: Arm, value: float) -> float:
        """Of an update on typical queries, with this gain per unit of signal, in queries."""
        return self._now.signal * value * self._rules.horizon_queries - self._cost(arm)

    def _cost(self, arm: Arm) -> float:
        """Of an update and of recording what it learns from, in queries."""
        return self._now.arms[arm].cost + _RECORDING_SHARE * self._rules.batch_queries[arm]

    def _is_covered(self, arm: Arm) -> bool:
        return self._ledger.can_afford(LEARNING, self._cost(arm) * fmean(self._now.seconds))

    def _posterior(self, arm: Arm) -> GainPosterior:
        """Of the gain per unit of signal; its memory is that of `alpha`, once measured at the presumed error."""
        if arm not in self._posteriors:
            belief, presumed = self._now.arms[arm], _PRESUMED_GAIN / max(1.0, self._now.signal)
            made = GainPosterior(
                mean=belief.mean, sd=presumed, noise=presumed, drift=(self._rules.alpha * presumed) ** 2
            )
            if belief.sd is not None:
                made.restore_sd(belief.sd)
            self._posteriors[arm] = made
        return self._posteriors[arm]


def policy_of(config: AdaptationConfig, tuning: Tuning, ledger: RegretLedger, *, rng: random.Random) -> Policy:
    fixed: dict[PolicyName, EveryBatch] = {
        "always": EveryBatch("full", tuning.always_queries),
        "head_only": EveryBatch("head", tuning.head_queries),
        "full_only": EveryBatch("full", tuning.full_queries),
        "never": EveryBatch(None),
    }
    if config.policy != "bandit":
        return fixed[config.policy]
    rules = BanditRules(
        batch_queries={"head": tuning.head_queries, "full": tuning.full_queries},
        alpha=config.alpha,
        epsilon=config.epsilon,
        s_min=config.s_min,
        warm_up_queries=tuning.warm_up_queries,
    )
    return Bandit(rules, ledger, rng=rng)
