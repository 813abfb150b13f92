"""The cost-aware bandit (SpecBlock section 3.4, algorithm 1): learns which kind of update is worth its time.

An arm's value is the gain of throughput per unit of signal, by replay, less the time that training took. A query's
predicted gain is its signal times that value. Beyond the algorithm, exploring has a budget: where nothing is gained,
what it costs is bounded.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal, cast

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, TypeAdapter

from adaptation.config import AdaptationConfig, PolicyName, Tuning
from adaptation.policy import ARMS, Arm, Decision, EveryBatch, Policy, QueryReport, Reason, State

_MOST_FRUITLESS = 8
"""Updates in a row that may count and fail to be published. What fails costs so little that one lucky publish would be
followed by dozens, and every query be recorded for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BanditRules:
    """The numbers of algorithm 1, and of the budget of exploring."""

    batch_queries: Mapping[Arm, int]  # size of each arm's buffer
    alpha: float
    epsilon: tuple[float, float]  # at first, and from the end of the cold start on
    s_min: float
    measured_queries: int  # N, those whose throughput is the baseline
    warm_up_queries: int = 10  # before the first decision: they give the first baseline
    cold_start_events: int = 8  # updates over which epsilon falls
    settling_queries: int = 2  # after an update, whose steps still pay for its training
    payback_queries: int = 200  # in which an update shall have paid for its time; N would charge all of it to N queries
    explore_share: float = 0.01  # of serving time, that exploring may cost in the long run, where it brings nothing
    explore_queries: float = 8.0  # what it may cost at once, in queries' serving time
    trials: Mapping[Arm, int] = field(default_factory=lambda: {"head": 1, "full": 8})
    """Updates before an arm's value is believed, where the budget of exploring allows it. Of full updates much may
    come, yet seldom at once: a few texts teach little."""


@dataclass
class _Work:
    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    tokens: NonNegativeFloat
    cost: NonNegativeFloat

    @property
    def throughput(self) -> float:
        return self.tokens / self.cost


@dataclass
class _Update:
    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    arm: Arm
    signal: NonNegativeFloat  # mean of the queries it learns from
    before: _Work
    stage: Literal["training", "published", "discarded"] = "training"
    tau_ratio: NonNegativeFloat = 1.0  # of candidate to serving; discarded, it changed nothing but the time it took
    counted: bool = True  # False: it says nothing of its arm
    training_cost: NonNegativeFloat = 0.0
    num_settling: NonNegativeInt = 0  # queries since it ended


@dataclass
class _Knowledge:
    """All that the bandit carries from one call to the next, beside its random source."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    num_queries: NonNegativeInt = 0
    num_events: NonNegativeInt = 0
    values: dict[Arm, float] = field(default_factory=lambda: dict.fromkeys(ARMS, 0.0))
    num_measured: dict[Arm, NonNegativeInt] = field(default_factory=lambda: dict.fromkeys(ARMS, 0))
    has_changed: bool = False  # traffic, since all of this was learnt last
    num_taken: dict[Arm, NonNegativeInt] = field(default_factory=lambda: dict.fromkeys(ARMS, 0))
    kept_full: bool = False  # a full update that was not published is part of what is trained on
    exploring: Arm | None = None  # until its buffer is full
    fruitless: NonNegativeInt = 0  # updates in a row that counted and were not published
    spent: NonNegativeFloat = 0.0  # on updates that brought less than they took, in queries' serving cost
    recent: list[_Work] = field(default_factory=list)
    signals: dict[Arm, list[NonNegativeFloat]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    update: _Update | None = None


_RandomState = tuple[int, tuple[int, ...], float | None]
_KNOWLEDGE = TypeAdapter(_Knowledge)
_RANDOM = TypeAdapter(_RandomState)


class Bandit:
    """A `Policy`."""

    def __init__(self, rules: BanditRules, *, rng: random.Random) -> None:
        self._rules = rules
        self._rng = rng
        self._now = _Knowledge()

    @property
    def values(self) -> Mapping[Arm, float]:
        return dict(self._now.values)

    @property
    def resting(self) -> bool:
        now = self._now
        is_idle = now.update is None and now.num_queries > self._rules.warm_up_queries
        return is_idle and now.exploring is None and not self._promises

    @property
    def epsilon(self) -> float:
        """Share of queries, at most, that explore where an arm pays: falls with every update of the cold start."""
        first, last = self._rules.epsilon
        progress = min(1.0, self._now.num_events / self._rules.cold_start_events)
        return first + (last - first) * progress

    def decide(self, query: QueryReport) -> Decision:
        if not query.usable:
            return Decision(None, "unusable")
        held = self._observe(query)
        if held is not None:
            return Decision(None, held)
        if query.signal is None:
            return Decision(None, "not_admitted")
        decision = self._choose(query.signal)
        if decision.arm is not None:
            waiting = self._now.signals[decision.arm]
            waiting.append(query.signal)
            del waiting[: -self._rules.batch_queries[decision.arm]]
        return decision

    def take_update(self) -> Arm | None:
        now = self._now
        order = sorted(self._order, key=self._share_of_trials)
        due = [arm for arm in order if len(now.signals[arm]) >= self._rules.batch_queries[arm]]
        if now.update is not None or not due:
            return None
        arm = max(due, key=lambda arm: now.values[arm] * fmean(now.signals[arm]))  # of equal ones the first
        now.update = _Update(arm, fmean(now.signals[arm]), _total(now.recent))
        now.signals[arm] = []
        now.num_taken[arm] += 1
        now.exploring = None if now.exploring == arm else now.exploring
        return arm

    def published(self, tau_ratio: float) -> None:
        assert 0 <= tau_ratio < math.inf, "a ratio that is none"
        self._end_training("published", tau_ratio, counted=True)

    def discarded(self, *, counted: bool = True) -> None:
        self._end_training("discarded", 1.0, counted=counted)

    def traffic_changed(self) -> None:
        """What the arms were worth says nothing of other texts: they are tried anew."""
        now = self._now
        self._now = _Knowledge(
            num_queries=now.num_queries,
            has_changed=True,
            recent=now.recent,
            signals=now.signals,
            update=now.update,
        )

    def reset(self) -> None:
        self._now = _Knowledge()

    def state(self) -> State:
        version, words, gauss = cast(_RandomState, self._rng.getstate())
        return {
            "knowledge": _KNOWLEDGE.dump_python(self._now, mode="json", exclude={"signals"}),  # nor are samples stored
            "random": [version, list(words), gauss],
        }

    def restore(self, state: State) -> None:
        if set(state) != {"knowledge", "random"}:
            raise ValueError("not the state of a bandit")
        now = _KNOWLEDGE.validate_python(state["knowledge"])
        if any(set(known) != set(ARMS) for known in (now.values, now.num_measured, now.num_taken, now.signals)):
            raise ValueError("the state of a bandit with other arms")
        if now.update is not None and now.update.stage == "training":
            now.update = None
        now.signals = {arm: [] for arm in ARMS}
        self._rng.setstate(_RANDOM.validate_python(state["random"]))
        self._now = now

    def _observe(self, query: QueryReport) -> Reason | None:
        """Count a query; says why no decision is due at it, if so."""
        now, rules = self._now, self._rules
        now.num_queries += 1
        now.spent = max(0.0, now.spent - rules.explore_share)
        now.recent = [*now.recent, _Work(query.emitted_tokens, query.serving_cost)][-rules.measured_queries :]
        self._charge_training(query.training_cost)
        if now.num_queries <= rules.warm_up_queries:
            return "warm_up"
        self._may_explore()
        return None

    def _may_explore(self) -> None:
        """Draw whether the arm that was tried least is tried now, by this query and those that follow: at most a share
        of epsilon of all queries where something pays, for none is drawn during an update; more where nothing does."""
        now, rules = self._now, self._rules
        if now.update is not None or now.exploring is not None or not self._can_afford:
            return
        arm = min(self._order, key=self._share_of_trials)
        if self._rng.random() < self.epsilon / (rules.batch_queries[arm] if self._promises else 1):
            now.exploring = arm

    def _charge_training(self, cost: float) -> None:
        """Whatever training took from any query since the update began is its cost: the baseline knows none of it."""
        update = self._now.update
        if update is None:
            return
        update.training_cost += cost
        if update.stage != "training":
            update.num_settling += 1
            if update.num_settling >= self._rules.settling_queries:
                self._settle(update)

    def _settle(self, update: _Update) -> None:
        """Turn a finished update into its arm's value. A replay has no noise of other texts, so that it is measured on
        the baseline's own queries; what it brings outlasts these, so that only their share of its time is charged to
        them. What is published with a full update in it is the full arm's."""
        now, is_published = self._now, update.stage == "published"
        work = replace(update.before, tokens=update.before.tokens * update.tau_ratio)
        self._charge(update, work)
        paid = update.training_cost * self._rules.measured_queries / self._rules.payback_queries
        gain = replace(work, cost=work.cost + paid).throughput - update.before.throughput
        counted = update.counted and update.signal > 0 and update.signal >= self._rules.s_min
        if counted:
            self._learn("full" if now.kept_full and is_published else update.arm, gain / update.signal)
        now.kept_full = not (is_published or update.counted) and (now.kept_full or update.arm == "full")
        now.fruitless = 0 if is_published else now.fruitless + counted
        now.num_events += 1
        now.update = None

    def _learn(self, arm: Arm, value: float) -> None:
        """The first values count as in a mean: an arm that was seldom tried would else seem worth little."""
        now = self._now
        now.num_measured[arm] += 1
        rate = max(self._rules.alpha, 1 / now.num_measured[arm])
        now.values[arm] += rate * (value - now.values[arm])

    def _charge(self, update: _Update, after: _Work) -> None:
        """Enter into the budget of exploring what an update took, less what it brings until it shall have paid."""
        mean_cost = fmean(work.cost for work in self._now.recent)
        brought = after.throughput / update.before.throughput - 1 if update.before.tokens else 0.0
        taken = update.training_cost / mean_cost
        self._now.spent = max(0.0, self._now.spent + taken - brought * self._rules.payback_queries)

    def _choose(self, signal: float) -> Decision:
        now = self._now
        untried = self._untried
        if untried and not self._has_given_up:
            wanting = [arm for arm in untried if len(now.signals[arm]) < self._rules.batch_queries[arm]]
            return Decision((wanting or untried)[0], "untried")
        if now.exploring is not None:
            return Decision(now.exploring, "explore")
        best = max(ARMS, key=lambda arm: now.values[arm])
        worthwhile = signal * now.values[best] > 0 and not self._has_given_up
        return Decision(best, "gain") if worthwhile else Decision(None, "no_gain")

    @property
    def _promises(self) -> bool:
        """Whether an update may be worth its time, as far as is known."""
        return not self._has_given_up and (bool(self._untried) or max(self._now.values.values()) > 0)

    @property
    def _can_afford(self) -> bool:
        """Whether the budget of exploring has something left."""
        return self._now.spent < self._rules.explore_queries

    @property
    def _has_given_up(self) -> bool:
        """Whether only exploring goes on, until something is published or the traffic changes."""
        return self._now.fruitless >= _MOST_FRUITLESS

    @property
    def _order(self) -> tuple[Arm, ...]:
        """The cheaper arm first, unless other traffic waits for what teaches more."""
        return tuple(reversed(ARMS)) if self._now.has_changed else ARMS

    @property
    def _untried(self) -> list[Arm]:
        """Arms of which too little will be known when what is under way has ended, the one tried least first."""
        now = self._now
        trials = self._rules.trials if self._can_afford else dict.fromkeys(ARMS, 1)
        under_way = now.update.arm if now.update is not None else None
        known = {arm: now.num_measured[arm] + (arm == under_way) for arm in ARMS}
        return sorted((arm for arm in self._order if known[arm] < trials[arm]), key=self._share_of_trials)

    def _share_of_trials(self, arm: Arm) -> float:
        return self._now.num_taken[arm] / self._rules.trials[arm]

    def _end_training(self, stage: Literal["published", "discarded"], tau_ratio: float, *, counted: bool) -> None:
        update = self._now.update
        assert update is not None, "an update ends that never began"
        assert update.stage == "training", "an update ends twice"
        update.stage, update.tau_ratio, update.counted = stage, tau_ratio, counted


def _total(works: list[_Work]) -> _Work:
    return _Work(sum(work.tokens for work in works), sum(work.cost for work in works))


def policy_of(config: AdaptationConfig, tuning: Tuning, *, rng: random.Random) -> Policy:
    fixed: dict[PolicyName, EveryBatch] = {
        "always": EveryBatch("full", tuning.always_queries),
        "head_only": EveryBatch("head", config.head_queries),
        "full_only": EveryBatch("full", config.full_queries),
        "never": EveryBatch(None),
    }
    if config.policy != "bandit":
        return fixed[config.policy]
    rules = BanditRules(
        batch_queries={"head": config.head_queries, "full": config.full_queries},
        alpha=config.alpha,
        epsilon=config.epsilon,
        s_min=config.s_min,
        measured_queries=config.measured_queries,
        warm_up_queries=tuning.warm_up_queries,
    )
    return Bandit(rules, rng=rng)
