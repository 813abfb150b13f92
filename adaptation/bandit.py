"""The cost-aware bandit (SpecBlock section 3.4, algorithm 1): learns which kind of update is worth its time.

Each arm has a value, the gain of throughput per unit of signal, measured over the queries after its updates with
their training included. A query's predicted gain is its signal times that value. Beyond the algorithm, exploring has a
budget: where nothing is gained, what it costs is bounded. Knows nothing of weights or engines.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal, cast

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, TypeAdapter

from adaptation.policy import ARMS, Arm, Decision, Measurement, QueryReport, Reason, State

_MOST_FRUITLESS = 8
"""Updates in a row that may count and fail to be published. What fails costs so little that one lucky publish would be
followed by dozens, and every query be recorded for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BanditRules:
    """The numbers of algorithm 1; what they mean is said in `AdaptationConfig`."""

    batch_queries: Mapping[Arm, int]
    alpha: float
    min_signal: float
    warm_up_queries: int
    cold_start_events: int
    epsilon_start: float
    epsilon_end: float
    blocked_queries: int
    measured_queries: int
    measured_seconds: float
    payback_queries: int
    explore_share: float
    explore_queries: float
    trials: Mapping[Arm, int]
    """Updates that are measured before their value is believed, where the budget of exploring allows it."""


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
    signal: NonNegativeFloat
    before: _Work
    stage: Literal["training", "published", "discarded"] = "training"
    ended_at: float = 0.0  # on the injected clock
    tau_ratio: NonNegativeFloat | None = None  # candidate to serving, where a replay knows it
    counted: bool = True  # False: it says nothing of its arm
    training_cost: NonNegativeFloat = 0.0
    num_blocked: NonNegativeInt = 0
    measured: list[_Work] = field(default_factory=list)

    @property
    def known(self) -> bool:
        """What it brought, without asking the queries that follow."""
        return self.stage == "discarded" or self.tau_ratio is not None


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
    last: Measurement | None = None


_RandomState = tuple[int, tuple[int, ...], float | None]
_KNOWLEDGE = TypeAdapter(_Knowledge)
_RANDOM = TypeAdapter(_RandomState)


class Bandit:
    """A `Policy`. `clock` must go on across restarts (time of day, in seconds)."""

    def __init__(self, rules: BanditRules, *, clock: Callable[[], float], rng: random.Random) -> None:
        self._rules = rules
        self._clock = clock
        self._rng = rng
        self._now = _Knowledge()

    @property
    def values(self) -> Mapping[Arm, float]:
        return dict(self._now.values)

    @property
    def last_measurement(self) -> Measurement | None:
        return self._now.last

    @property
    def resting(self) -> bool:
        now = self._now
        is_idle = now.update is None and now.num_queries > self._rules.warm_up_queries
        return is_idle and now.exploring is None and not self._promises

    @property
    def epsilon(self) -> float:
        """Share of queries, at most, that explore where an arm pays: falls with every update of the cold start."""
        rules = self._rules
        progress = min(1.0, self._now.num_events / rules.cold_start_events)
        return rules.epsilon_start + (rules.epsilon_end - rules.epsilon_start) * progress

    def decide(self, query: QueryReport) -> Decision:
        if not query.usable:
            return Decision(None, "unusable", {})
        held = self._observe(query)
        if held is not None:
            return Decision(None, held, {})
        if query.signal is None:
            return Decision(None, "not_admitted", {})
        decision = self._choose(query.signal)
        if decision.arm is not None:
            waiting = self._now.signals[decision.arm]
            waiting.append(query.signal)
            del waiting[: -self._rules.batch_queries[decision.arm]]
        return decision

    def take_update(self) -> Arm | None:
        self._drop_stale_measurement()
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

    def published(self, tau_ratio: float | None = None) -> None:
        self._end_training("published", tau_ratio)

    def discarded(self, *, counted: bool = True) -> None:
        self._end_training("discarded", counted=counted)

    def traffic_changed(self) -> None:
        """What the arms were worth says nothing of other texts: they are tried anew."""
        now = self._now
        self._now = _Knowledge(
            num_queries=now.num_queries,
            has_changed=True,
            recent=now.recent,
            signals=now.signals,
            update=now.update,
            last=now.last,
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
        work = _Work(query.emitted_tokens, query.serving_cost)
        now.recent = [*now.recent, work][-rules.measured_queries :]
        blocked = self._measure(work, query.training_cost)
        if now.num_queries <= rules.warm_up_queries:
            return "warm_up"
        self._may_explore()
        return "blocked" if blocked else None

    def _may_explore(self) -> None:
        """Draw whether the arm that was tried least is tried now, by this query and those that follow: at most a share
        of epsilon of all queries where something pays, for none is drawn during an update; more where nothing does."""
        now, rules = self._now, self._rules
        if now.update is not None or now.exploring is not None or not self._can_afford:
            return
        arm = min(self._order, key=self._share_of_trials)
        if self._rng.random() < self.epsilon / (rules.batch_queries[arm] if self._promises else 1):
            now.exploring = arm

    def _measure(self, work: _Work, training_cost: float) -> bool:
        """Let a query count for the update under way; True while it is one of those that old and new drafter share, of
        an update that they measure.

        Whatever training took from any query since the update began is its cost: the baseline knows none of it.
        """
        self._drop_stale_measurement()
        update, rules = self._now.update, self._rules
        if update is None:
            return False
        update.training_cost += training_cost
        if update.stage == "training":
            return False
        blocked = update.num_blocked < rules.blocked_queries
        if blocked:
            update.num_blocked += 1
        else:
            update.measured.append(work)
        if update.num_blocked >= rules.blocked_queries and self._measured_enough(update):
            self._settle(update)
        return blocked and not update.known

    def _measured_enough(self, update: _Update) -> bool:
        return update.known or len(update.measured) >= self._rules.measured_queries

    def _work_after(self, update: _Update) -> _Work:
        """A replay has no noise of other texts, and a discarded update changed nothing but the time it took: both are
        judged on the baseline's own queries."""
        if update.tau_ratio is not None:
            return replace(update.before, tokens=update.before.tokens * update.tau_ratio)
        return update.before if update.stage == "discarded" else _total(update.measured)

    def _settle(self, update: _Update) -> None:
        """Turn a finished measurement into the arm's value. What an update brings outlasts the queries that measure
        it, so that only their share of its time is charged to them. What is published with a full update in it is the
        full arm's."""
        now = self._now
        work = self._work_after(update)
        paid = update.training_cost * self._rules.measured_queries / self._rules.payback_queries
        measurement = Measurement(
            arm=update.arm,
            published=update.stage == "published",
            signal=update.signal,
            before=update.before.throughput,
            after=replace(work, cost=work.cost + paid).throughput,
            counted=update.counted and update.signal > 0 and update.signal >= self._rules.min_signal,
        )
        self._charge(update, work)
        if measurement.counted:
            learns: Arm = "full" if now.kept_full and measurement.published else update.arm
            self._learn(learns, measurement.gain / measurement.signal)
        now.kept_full = update.stage == "discarded" and not update.counted and (now.kept_full or update.arm == "full")
        now.fruitless = 0 if measurement.published else now.fruitless + measurement.counted
        now.num_events += 1
        now.last = measurement
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
        gains = {arm: signal * now.values[arm] for arm in ARMS}
        untried = self._untried
        if untried and not self._has_given_up:
            wanting = [arm for arm in untried if len(now.signals[arm]) < self._rules.batch_queries[arm]]
            return Decision((wanting or untried)[0], "untried", gains)
        if now.exploring is not None:
            return Decision(now.exploring, "explore", gains)
        best = max(ARMS, key=lambda arm: gains[arm])
        worthwhile = gains[best] > 0 and not self._has_given_up
        return Decision(best, "gain", gains) if worthwhile else Decision(None, "no_gain", gains)

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

    def _end_training(
        self, stage: Literal["published", "discarded"], tau_ratio: float | None = None, *, counted: bool = True
    ) -> None:
        update = self._now.update
        assert update is not None, "an update ends that never began"
        assert update.stage == "training", "an update ends twice"
        assert tau_ratio is None or (math.isfinite(tau_ratio) and tau_ratio >= 0), "a ratio that is none"
        update.stage = stage
        update.tau_ratio = tau_ratio
        update.counted = counted
        update.ended_at = self._clock()
        if not self._rules.blocked_queries and self._measured_enough(update):
            self._settle(update)

    def _drop_stale_measurement(self) -> None:
        update = self._now.update
        if update is None or update.stage == "training" or update.known:
            return
        if self._clock() - update.ended_at > self._rules.measured_seconds:
            self._now.update = None


def _total(works: list[_Work]) -> _Work:
    return _Work(sum(work.tokens for work in works), sum(work.cost for work in works))
