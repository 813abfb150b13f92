"""Decides whether to take an action of uncertain gain: draft in this step, run the network as well, train, record.

    act if the ledger covers the worst case, and mean + z * sd > 0

`GainPosterior` estimates the mean net gain of one action. `RegretLedger` bounds what all actions together may lose,
however wrong their posteriors are. `StepDecision` combines both for an action that is decided anew in each step. If the
gain is clear, the posterior decides and the ledger stays full. If not, exploring may cost at most the ledger's balance,
and then SHARE of the serving time.
"""

import math
import threading
from collections.abc import Hashable, Sequence
from typing import Any

SHARE = 0.01
"""Share of serving time that exploration may lose in the long run."""
CAP_STEPS = 16.0
"""Cap of an account in plain steps, the most that drafting or a further drafter may lose at once: 3 % of an answer of
512 tokens. With a variance of 1 step^2 per step, an action that gains 10 %, with 1 % accrued, has an empty account in
exp(-2 * 0.11 * 16) = 3 % of the time (a reflected random walk)."""
TRIAL_STEPS = 8
"""Steps that the ledger must cover before a drafter reads a new sequence, half of the cap: fewer would show little, and
reading the prompt costs time as well."""
_DOUBT = 2.0
"""z, in standard deviations: an action of zero gain is given up by chance in one case of 44."""
_DRIFT = 1.0 / 128**2
"""Variance that drift adds to a mean per step, for noise 1: about the last 128 observations count, the length of an
answer. With 64, a loss of a fifth of a step would never become certain."""
_NOISE_PRIOR = 8.0
"""Weight of the presumed noise, in observations."""
_NOISE_MEMORY = 128.0  # observations that the noise estimate averages over, as for the mean
_FARTHEST = 4.0  # standard deviations at which an observation is clipped, so that no outlier decides
_TIME_NOISE = 0.1
"""Standard deviation of one observation of a baseline: seconds of a step, relative to the expected ones."""
_TIME_DRIFT = _TIME_NOISE**2 / 512
"""Drift of a baseline: after 512 steps without an observation it is as uncertain as after its first one."""


def bucket_of(num_sequences: int) -> int:
    """Number of the batch-size bucket, from 1: that of the nearest power of two. The most clients that a server has is
    often one, and their batch is smaller by one for a step whenever one answer follows another."""
    return 1 + round(math.log2(max(1, num_sequences)))


class GainPosterior:
    """Normal posterior of an action's mean net gain, in plain steps, by a local level model:

        gain = mean + N(0, r);    mean <- mean + N(0, drift)  per step, observed or not

    where r is the variance of one observation, the larger of the presumed and the observed one (an action that never
    gains shows no noise). The Kalman filter of this model (Durbin, Koopman, "Time Series Analysis by State Space
    Methods", 2012, section 2.2) weighs an observation by p / (p + r), where p is the variance of the mean: like an
    average at first, and by about sqrt(drift / r) in the long run. Without observations the mean stays the same, and
    its variance returns to the prior's.
    """

    def __init__(self, *, mean: float = 0.0, sd: float = 1.0, noise: float = 1.0, drift: float = _DRIFT) -> None:
        """`mean`, `sd`: the prior; `noise`: presumed standard deviation of one observation; `drift`: variance added per
        step."""
        self.mean = mean
        self._first = self._variance = sd * sd
        self._presumed = self._noise = noise * noise
        self._drift = drift
        self._count = 0

    @property
    def sd(self) -> float:
        """Standard deviation of the mean."""
        return math.sqrt(self._variance)

    @property
    def is_observed(self) -> bool:
        """Whether `observe` was called without a noise of its own."""
        return self._count > 0

    @property
    def noise(self) -> float:
        """Standard deviation of one observation."""
        return math.sqrt(self._noise)

    @property
    def may_gain(self) -> bool:
        """Whether the upper bound of the mean gain is above 0."""
        return self.best_case > 0.0

    @property
    def best_case(self) -> float:
        """Upper bound of the mean gain, mean + z * sd."""
        return self.mean + _DOUBT * self.sd

    @property
    def worst_case(self) -> float:
        """Lower bound of the mean gain, mean - z * sd."""
        return self.mean - _DOUBT * self.sd

    def restore_sd(self, sd: float) -> None:
        """Set the standard deviation of the mean to an earlier value, capped at the prior's."""
        self._variance = min(self._first, sd * sd)

    def is_sign_known(self, deviation: float) -> bool:
        """Whether the sign of the mean is certain, given a further error of this standard deviation."""
        return abs(self.mean) > _DOUBT * math.hypot(self.sd, deviation)

    def observe(self, gain: float, noise: float | None = None) -> None:
        """Update the posterior with the gain of one step. `noise`: standard deviation of this observation, if known."""
        variance = self._noise if noise is None else noise * noise
        farthest = _FARTHEST * math.sqrt(self._variance + variance)
        surprise = min(max(gain - self.mean, -farthest), farthest)
        weight = self._variance / (self._variance + variance)
        if noise is None:
            self._count += 1
            rate = 1.0 / min(self._count + _NOISE_PRIOR, _NOISE_MEMORY)
            # Without the part of the surprise that comes from the uncertain mean.
            seen = self._noise + rate * (surprise * surprise * (1.0 - weight) - self._noise)
            self._noise = max(self._presumed, seen)
        self.mean += weight * surprise
        self._variance *= 1.0 - weight
        self.advance()

    def advance(self, steps: float = 1.0) -> None:
        """Add the drift of `steps` steps: the mean becomes less certain."""
        self._variance = min(self._first, self._variance + steps * self._drift)

    def steps_until(self, sd: float) -> int:
        """Number of steps without observations until the mean has this standard deviation."""
        return max(0, math.ceil((sd * sd - self._variance) / self._drift))

    def widen(self, share: float = 1.0) -> None:
        """Add a share of the prior's variance, because weights or traffic changed; 1 makes the mean as uncertain as the
        prior."""
        self._variance = min(self._first, self._variance + share * self._first)

    def state(self) -> list[float]:
        """Return mean, variance, variance of the noise and number of observations, for `restore`."""
        return [self.mean, self._variance, self._noise, float(self._count)]

    def restore(self, state: Sequence[float]) -> None:
        """Continue from a result of `state`. Raises ValueError or TypeError if it is not one."""
        mean, variance, noise, count = map(float, state)
        if not (math.isfinite(mean) and 0.0 < variance <= self._first and 0.0 < noise < math.inf and count >= 0):
            raise ValueError(f"invalid state of a posterior: {state}")
        self.mean, self._variance, self._noise, self._count = mean, variance, noise, int(count)


class RegretLedger:
    """Bounds the loss of a server's actions against never acting, in seconds of serving. Each account has a balance of
    at most its cap. Gains and losses of its actions are recorded there, and a share of the serving time is added. An
    action is not taken if the balance does not cover its worst case. Thread-safe.

    Only losses are subtracted, hence balance(T) <= balance(0) + gains + share * T. An action can overdraw a balance
    only by as much as its loss exceeds its worst case. So for any sequence of gains

        sum of gains >= -(caps + share * T + one action)
    """

    def __init__(self, *, share: float = SHARE) -> None:
        """`share`: share of serving time that is added, divided among all accounts."""
        self._share = share
        self._caps: dict[str, float] = {}
        self.balances: dict[str, float] = {}  # seconds by account
        self.lost_seconds: dict[str, float] = {}  # seconds by account; gains are not deducted
        self._lock = threading.Lock()

    def open(self, account: str, cap: float, balance: float | None = None) -> None:
        """Open or reset an account, in seconds; without `balance` it starts at its cap."""
        with self._lock:
            self._caps[account] = cap
            self.balances[account] = cap if balance is None else min(cap, balance)
            self.lost_seconds.setdefault(account, 0.0)

    def share_left(self, account: str) -> float:
        """Return the balance as a share of its cap; 1 before the account is opened."""
        return self.balances[account] / self._caps[account] if account in self.balances else 1.0

    def accrue(self, seconds: float) -> None:
        """Divide the share of `seconds` of serving time among the accounts; full ones pass theirs on."""
        spare = self._share * seconds
        with self._lock:
            missing = ((cap - self.balances[name], name) for name, cap in self._caps.items())
            poorest_last = sorted(one for one in missing if one[0] > 0.0)
            for left, (most, name) in zip(range(len(poorest_last), 0, -1), poorest_last, strict=True):
                added = min(spare / left, most)
                self.balances[name] += added
                spare -= added

    def can_afford(self, account: str, worst_seconds: float) -> bool:
        """Whether the balance covers a loss of `worst_seconds`, or is full."""
        return self.balances[account] >= min(worst_seconds, self._caps[account])

    def record(self, account: str, gained_seconds: float) -> None:
        """Record a gain of an action of this account; negative: a loss."""
        with self._lock:
            self.balances[account] = min(self._caps[account], self.balances[account] + gained_seconds)
            self.lost_seconds[account] += max(0.0, -gained_seconds)

    def raise_cap(self, account: str, seconds: float) -> None:
        """Raise the account's cap to at least `seconds`, the cost of one action, so that it can be afforded at all."""
        with self._lock:
            self._caps[account] = max(self._caps[account], seconds)


class StepDecision:
    """Decides whether to take an action in a step. For each key and batch-size bucket it keeps two posteriors: of the
    action's gain, in plain steps, and of the *baseline*, the time of a step without the action. Accounts in the ledger
    bound the losses.

    Batch-size buckets: `bucket_of`. The gain of a step is a mean over its sequences, so its variance falls with
    their number. A new bucket starts from the mean gain of a neighbouring one.
    """

    def __init__(
        self, name: str, ledger: RegretLedger, *, noise: float = 1.0, baseline: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        """`name`: prefix of its accounts in the ledger; `noise`: presumed standard deviation of the gain of one
        sequence in one step; `baseline`: mean and standard deviation of the prior of each baseline."""
        self._name, self._ledger, self._noise, self._baseline = name, ledger, noise, baseline
        self._gains: dict[tuple[Hashable, int], GainPosterior] = {}
        self._baselines: dict[tuple[Hashable, int], GainPosterior] = {}
        self._accounts: dict[str, str] = {}  # account -> its name in the ledger

    def gain(self, num_sequences: int, key: Hashable = None) -> GainPosterior:
        """Return the gain posterior for a batch of `num_sequences`; it is created if missing."""
        size = bucket_of(num_sequences)
        found = self._gains.get((key, size))
        if found is None:
            near = (self._gains.get((key, other)) for other in (size - 1, size + 1))
            neighbour = next((one for one in near if one is not None), None)
            mean, noise = neighbour.mean if neighbour else 0.0, self._noise * 2.0 ** (-(size - 1) / 2)
            drift = self._noise**2 * _DRIFT
            found = self._gains[key, size] = GainPosterior(mean=mean, noise=noise, drift=drift)
        return found

    def baseline(self, num_sequences: int, key: Hashable = None) -> GainPosterior:
        """Return the baseline posterior for a batch of `num_sequences`; it is created if missing."""
        place = key, bucket_of(num_sequences)
        if place not in self._baselines:
            mean, sd = self._baseline
            self._baselines[place] = GainPosterior(mean=mean, sd=sd, noise=_TIME_NOISE, drift=_TIME_DRIFT)
        return self._baselines[place]

    def may_gain(self, num_sequences: int, key: Hashable) -> bool | None:
        """Return whether the action may gain for a batch of `num_sequences`, or None if there is no posterior yet."""
        known = self._gains.get((key, bucket_of(num_sequences)))
        return None if known is None else known.may_gain

    @staticmethod
    def needs_baseline(gain: GainPosterior, deviation: float) -> bool:
        """Whether a step without the action is more informative than one with it: the sign of the gain is uncertain,
        and the error of the baseline, of standard deviation `deviation`, is the larger part of that uncertainty."""
        return deviation >= gain.sd and not gain.is_sign_known(deviation)

    def can_afford(self, account: str, steps: float, step_seconds: float) -> bool:
        """Whether the account covers the loss of `steps` steps; True before it is opened."""
        name = self._named(account)
        return name not in self._ledger.balances or self._ledger.can_afford(name, steps * step_seconds)

    def settle(self, account: str, gained_seconds: float, step_seconds: float) -> None:
        """Record the gain of a step in the ledger; negative: a loss. The account is opened, with a full balance, by the
        first call with known `step_seconds` (0: unknown)."""
        name = self._named(account)
        if name not in self._ledger.balances:
            if not step_seconds:
                return
            self._ledger.open(name, CAP_STEPS * step_seconds)
        self._ledger.record(name, gained_seconds)

    def totals(self) -> tuple[float, float]:
        """Return the sum of its accounts' balances, and of their losses without deducting gains, in seconds."""
        ledger, names = self._ledger, self._accounts.values()
        balances, losses = ([of.get(name, 0.0) for name in names] for of in (ledger.balances, ledger.lost_seconds))
        return sum(balances), sum(losses)

    def widen(self) -> None:
        """Make every mean gain as uncertain as its prior, because other weights draft now."""
        for posterior in self._gains.values():
            posterior.widen()

    def state(self) -> dict[str, list[Any]]:
        """Return all posteriors and the shares left of all accounts as JSON values, for `restore`. Keys of baselines
        are left out."""
        gains = [[key, size, posterior.state()] for (key, size), posterior in self._gains.items()]
        plain = [[size, one.state()] for (_, size), one in self._baselines.items()]
        left = [[account, self._ledger.share_left(name)] for account, name in self._accounts.items()]
        return {"gains": gains, "plain": plain, "left": left}

    def restore(self, state: dict[str, list[Any]], widened: float, step_seconds: float) -> None:
        """Continue from a result of `state` with gains widened by the share `widened` of the prior; accounts are in
        plain steps of `step_seconds`. Raises ValueError, KeyError or TypeError for an invalid state, and then changes
        nothing."""
        left = [(self._named(str(account)), min(1.0, float(share))) for account, share in state["left"]]
        fresh = StepDecision(self._name, self._ledger, noise=self._noise, baseline=self._baseline)
        for size, posterior in state["plain"]:
            fresh.baseline(1 << (size - 1)).restore(posterior)
        for key, size, posterior in state["gains"]:
            found = fresh.gain(1 << (size - 1), key)
            found.restore(posterior)
            found.widen(widened)
        self._gains, self._baselines = fresh._gains, fresh._baselines
        for name, share in left:
            self._ledger.open(name, CAP_STEPS * step_seconds, share * CAP_STEPS * step_seconds)

    def _named(self, account: str) -> str:
        if account not in self._accounts:
            self._accounts[account] = f"{self._name} {account}"
        return self._accounts[account]
