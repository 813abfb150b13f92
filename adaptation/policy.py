"""The policy of learning: which finished queries are learnt from, and when an update is due."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, cast

from pydantic import ConfigDict, JsonValue, NonNegativeFloat, NonNegativeInt, TypeAdapter

from adaptation.config import AdaptationConfig, Tuning
from drafters.decision import GainPosterior, RegretLedger

Arm = Literal["head", "full"]
ARMS: tuple[Arm, ...] = ("head", "full")

Reason = Literal[
    "warm_up",  # too few queries to know how long one takes
    "not_admitted",  # the query may not be learnt from, or was not recorded
    "unusable",  # the query's numbers are not finite, or no step decoded for it
    "explore",  # an arm may gain, or was drawn at random
    "gain",  # an arm is expected to gain
    "no_gain",  # no arm is expected to gain
    "not_covered",  # an arm may gain, but the ledger does not cover trying it
    "never",  # there are no arms: the policy never learns
]

State = dict[str, JsonValue]  # plain values that restore the exact state in a later process


@dataclass(frozen=True, slots=True)
class QueryReport:
    """Time and signal of one finished query."""

    seconds: float  # decoding time, as in `Query`
    signal: float | None  # s, the sum of (1 - r) over its rejected positions; None: the query is not learnt from
    recorded: bool = True
    drafted: bool = True  # whether blocks were drafted for it; without their states it cannot train the heads

    @property
    def usable(self) -> bool:
        """Whether the query's numbers are finite and not negative, and its time is above 0."""
        seconds_count = math.isfinite(self.seconds) and self.seconds > 0
        return seconds_count and (self.signal is None or (math.isfinite(self.signal) and self.signal >= 0))


@dataclass(frozen=True, slots=True)
class Judgement:
    """Measured gain of the updated training copy over the serving drafter, from replaying validation texts."""

    gain: float  # relative gain in tokens per verify of all updates since the training copy equalled the served weights
    error: float  # standard error of this update's own gain
    needed: float = 0.0  # critical value of the gate: part of a published gain is selection
    before: float = 0.0  # gain before this update, by earlier ones that were refused

    def __post_init__(self) -> None:
        numbers = self.gain, self.error, self.needed, self.before
        assert all(map(math.isfinite, numbers)), "a judgement that is not finite"


@dataclass(frozen=True, slots=True)
class Choice:
    """The arm that gets a query, and the reason."""

    arm: Arm | None  # None: skip
    reason: Reason


_RATE_GROWTH, _RATE_CUT = 1.25, 0.7  # factors of the share: after a publish, and after a clearly worse candidate
_FIRST_SHARE, _LEAST_SHARE = 0.5, 0.25
LEARNING = "learning"
"""Name of the ledger account that all costs of learning are charged to."""

_PRIOR_GAIN = 0.05
"""Prior standard deviation of the gain of an update on a typical batch: one in three changes tau by more."""
_MIN_ERROR = 0.01  # smallest standard error of a gain: few texts are no more certain, even if they are alike
_RECORDING_SHARE = 0.02  # cost of recording in shares of a query's seconds: 0.16 ms of steps of 6 to 15 ms (CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class BanditRules:
    """Hyper-parameters of the bandit (SpecBlock, algorithm 1) and of its ledger."""

    batch_queries: Mapping[Arm, int]  # size of each arm's buffer; without arms nothing is learnt
    alpha: float  # minimum weight of a new measurement
    epsilon: tuple[float, float]  # share of exploring queries: at first, and after the cold start
    s_min: float  # updates of less signal leave the value of their arm unchanged
    warm_up_queries: int = 10  # queries before the first decision; also the window of the mean query
    cold_start_events: int = 8  # judged updates over which epsilon falls
    horizon_queries: int = 200  # queries within which an update has to pay for itself
    cap_queries: float = 8.0  # serving time that learning may have lost at once, in mean queries


class Pace:
    """Each arm's share of its learning rate, raised after a publish and cut after a clearly worse candidate.

    Far from the traffic large steps learn faster; close to it they make a trained drafter forget.
    """

    def __init__(self) -> None:
        self._shares = dict.fromkeys(ARMS, _FIRST_SHARE)

    def share(self, arm: Arm) -> float:
        """Share of the arm's learning rate, above 0 and at most 1."""
        return self._shares[arm]

    def published(self, arm: Arm) -> None:
        """Raise the arm's share after a published update."""
        self._shares[arm] = min(1.0, self._shares[arm] * _RATE_GROWTH)

    def clearly_worse(self, arm: Arm) -> None:
        """Cut the arm's share after an update that made the drafter clearly worse."""
        self._shares[arm] = max(_LEAST_SHARE, self._shares[arm] * _RATE_CUT)

    def traffic_changed(self) -> None:
        """Use the whole learning rate, because the drafter may be far from the new traffic."""
        self._shares = dict.fromkeys(ARMS, 1.0)


@dataclass
class _Belief:
    """Estimated value and cost of one arm."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    mean: float = 0.0  # gain per unit of signal
    sd: NonNegativeFloat | None = None  # None: not measured
    cost: NonNegativeFloat = 0.0  # cost of an update, in mean queries
    num_updates: NonNegativeInt = 0


@dataclass
class _Knowledge:
    """The bandit's state, without its random generator."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    num_queries: NonNegativeInt = 0
    num_events: NonNegativeInt = 0
    seconds: list[NonNegativeFloat] = field(default_factory=list)  # seconds of the last `warm_up_queries` queries
    signal: NonNegativeFloat = 0.0  # moving average of the signal of a query
    balance: float | None = None  # seconds in the ledger; None: it is not opened yet
    arms: dict[Arm, _Belief] = field(default_factory=lambda: {arm: _Belief() for arm in ARMS})


_RandomState = tuple[int, tuple[int, ...], float | None]
_KNOWLEDGE = TypeAdapter(_Knowledge)
_RANDOM = TypeAdapter(_RandomState)


class Bandit:
    """The cost-aware bandit (SpecBlock section 3.4, algorithm 1): learns which kind of update is worth its time.

    An arm's value is its gain of throughput per unit of signal. An update on queries of mean signal s is worth, in
    queries,

        s * value * horizon - cost

    where horizon is the number of queries within which it has to pay for itself. The value is a posterior, since
    replays are noisy with a known error. Trials are paid from a separate ledger account, so that the loss is bounded
    and drafting is tried no less often. All calls come from the adaptation thread.
    """

    def __init__(self, rules: BanditRules, *, rng: random.Random) -> None:
        self.name = "bandit" if rules.batch_queries else "never"
        self._rules = rules
        self._ledger = RegretLedger()  # opened when the time of a mean query is known
        self._rng = rng
        self._now = _Knowledge()
        self._posteriors: dict[Arm, GainPosterior] = {}

    @property
    def values(self) -> Mapping[Arm, float]:
        """Estimated gain of throughput per unit of signal, by arm."""
        return {arm: self._now.arms[arm].mean for arm in self._rules.batch_queries}

    @property
    def balance(self) -> float | None:
        """Serving time in seconds that learning may still take; None until the ledger is opened."""
        return self._ledger.balances.get(LEARNING)

    @property
    def _is_warm(self) -> bool:
        return LEARNING in self._ledger.balances and bool(self._now.seconds)

    @property
    def resting(self) -> bool:
        """Whether no arm that the ledger covers may gain."""
        return not self._rules.batch_queries or (self._is_warm and self._promising(ARMS) is None)

    @property
    def epsilon(self) -> float:
        """Share of the admitted queries that explore; falls with each judged update of the cold start."""
        first, last = self._rules.epsilon
        return first + (last - first) * min(1.0, self._now.num_events / self._rules.cold_start_events)

    def covers(self, seconds: float) -> bool:
        """Whether the ledger covers this many seconds, which training took from serving and which are not charged
        yet."""
        return not self._is_warm or self._ledger.balances[LEARNING] > seconds

    def decide(self, query: QueryReport) -> Choice:
        """Choose the buffer of a finished query, with the reason. Called for every query, in order."""
        if not self._rules.batch_queries:
            return Choice(None, "never")
        if not query.usable:
            return Choice(None, "unusable")
        self._observe(query)
        if not self._is_warm:
            return Choice(None, "warm_up")
        if query.signal is None:
            return Choice(None, "not_admitted")
        arms: Sequence[Arm] = ARMS if query.drafted else ("full",)
        arm = self._choose(arms)
        if arm is None:
            return Choice(None, "not_covered" if self._promising(arms, covered=False) else "no_gain")
        return Choice(arm, "gain" if self._net_gain(arm, self._now.arms[arm].mean) > 0 else "explore")

    def due(self, signals: Mapping[Arm, Sequence[float]]) -> Arm | None:
        """Return an arm whose buffer is full and whose update the ledger covers, or None. `signals`: signals of the
        samples in each arm's buffer."""
        if not self._is_warm:
            return None
        sizes = self._rules.batch_queries
        full = [arm for arm in sizes if len(signals[arm]) >= sizes[arm] and self._is_covered(arm)]
        return max(full, key=self._best_net_gain, default=None)

    def ended(self, arm: Arm, signal: float, judgement: Judgement, seconds: float, *, published: bool) -> None:
        """Update value and cost of an arm, and the ledger, after a judged update. `signal`: mean signal of its queries;
        `seconds`: taken from serving."""
        belief, rules = self._now.arms[arm], self._rules
        mean_seconds = fmean(self._now.seconds)
        belief.num_updates += 1
        self._now.num_events += 1
        rate = max(rules.alpha, 1.0 / belief.num_updates)
        belief.cost += rate * (seconds / mean_seconds - belief.cost)
        if signal > 0 and signal >= rules.s_min:
            posterior = self._posterior(arm)
            gain = judgement.gain - judgement.before
            posterior.observe(gain / signal, noise=max(judgement.error, _MIN_ERROR) / signal)
            belief.mean, belief.sd = posterior.mean, posterior.sd
        gained = 0.0
        if published:  # publishing selects lucky candidates, so only the certain part of the gain counts
            gained = max(0.0, min(judgement.gain - judgement.needed, self._posterior(arm).worst_case * signal))
        self._ledger.raise_cap(LEARNING, seconds)
        self._ledger.record(LEARNING, gained * rules.horizon_queries * mean_seconds - seconds)

    def spent(self, seconds: float) -> None:
        """Charge seconds taken from serving to the ledger and to no arm, because an update was interrupted or not
        judged."""
        if self._is_warm:
            self._ledger.raise_cap(LEARNING, seconds)
            self._ledger.record(LEARNING, -seconds)

    def traffic_changed(self) -> None:
        """Make the values of arms less certain, because other texts, or weights that did not come from an update, are
        served."""
        for arm, posterior in self._posteriors.items():
            posterior.widen()
            self._now.arms[arm].sd = posterior.sd

    def state(self) -> State:
        """Serializable state."""
        version, words, gauss = cast(_RandomState, self._rng.getstate())
        self._now.balance = self._ledger.balances.get(LEARNING)
        return {"knowledge": _KNOWLEDGE.dump_python(self._now, mode="json"), "random": [version, list(words), gauss]}

    def restore(self, state: State) -> None:
        """Load what `state` returned; an update under way is lost. Raises ValueError for anything else, and then
        changes nothing."""
        if not state and not self._rules.batch_queries:  # 0.3.0 saved an empty state for `never`
            return
        if set(state) != {"knowledge", "random"}:
            raise ValueError("not a bandit state")
        now = _KNOWLEDGE.validate_python(state["knowledge"])
        if set(now.arms) != set(ARMS) or (now.balance is not None and not any(now.seconds)):
            raise ValueError("bandit state with other arms, or with a balance but no query times")
        self._rng.setstate(_RANDOM.validate_python(state["random"]))
        self._now, self._posteriors = now, {}
        if now.balance is not None:
            self._open(now.balance)

    def _observe(self, query: QueryReport) -> None:
        """Count a query and its time, and charge its recording."""
        now, rules = self._now, self._rules
        now.num_queries += 1
        now.seconds = [*now.seconds, query.seconds][-rules.warm_up_queries :]
        if query.signal:
            now.signal += (query.signal - now.signal) * (rules.alpha if now.signal else 1.0)
        self._ledger.accrue(query.seconds)
        if self._is_warm:
            self._ledger.record(LEARNING, -_RECORDING_SHARE * query.seconds * query.recorded)
        elif now.num_queries > rules.warm_up_queries:
            self._open()

    def _open(self, balance: float | None = None) -> None:
        self._ledger.open(LEARNING, self._rules.cap_queries * fmean(self._now.seconds), balance)

    def _choose(self, arms: Sequence[Arm]) -> Arm | None:
        """Choose the least tried arm with probability `epsilon`, else the arm with the highest best case. Returns None
        if no arm may gain, or the ledger does not cover it."""
        if self._rng.random() < self.epsilon:
            arm = min(arms, key=lambda arm: self._now.arms[arm].num_updates)
            return arm if self._is_covered(arm) else None
        return self._promising(arms)

    def _promising(self, arms: Sequence[Arm], *, covered: bool = True) -> Arm | None:
        """Return the arm with the highest best case, or None if that is no gain."""
        able = [arm for arm in arms if not covered or self._is_covered(arm)]
        best = max(able, key=self._best_net_gain, default=None)
        return best if best is not None and self._best_net_gain(best) > 0 else None

    def _best_net_gain(self, arm: Arm) -> float:
        return self._net_gain(arm, self._posterior(arm).best_case)

    def _net_gain(self, arm: Arm, value: float) -> float:
        """Net gain of an update on typical queries, in queries. `value`: gain per unit of signal."""
        return self._now.signal * value * self._rules.horizon_queries - self._cost(arm)

    def _cost(self, arm: Arm) -> float:
        """Cost of an update and of recording its samples, in queries."""
        return self._now.arms[arm].cost + _RECORDING_SHARE * self._rules.batch_queries[arm]

    def _is_covered(self, arm: Arm) -> bool:
        return self._ledger.can_afford(LEARNING, self._cost(arm) * fmean(self._now.seconds))

    def _posterior(self, arm: Arm) -> GainPosterior:
        """Posterior of the gain per unit of signal; it forgets at the rate `alpha` if measured at the prior error."""
        if arm not in self._posteriors:
            belief, prior = self._now.arms[arm], _PRIOR_GAIN / max(1.0, self._now.signal)
            made = GainPosterior(mean=belief.mean, sd=prior, noise=prior, drift=(self._rules.alpha * prior) ** 2)
            if belief.sd is not None:
                made.restore_sd(belief.sd)
            self._posteriors[arm] = made
        return self._posteriors[arm]


def policy_of(config: AdaptationConfig, tuning: Tuning) -> Bandit:
    """Build the configured policy."""
    batch_queries: dict[Arm, int] = {"head": tuning.head_queries, "full": tuning.full_queries}
    rules = BanditRules(
        batch_queries={} if config.policy == "never" else batch_queries,
        alpha=config.alpha,
        epsilon=config.epsilon,
        s_min=config.s_min,
        warm_up_queries=tuning.warm_up_queries,
    )
    return Bandit(rules, rng=random.Random(tuning.seed))
