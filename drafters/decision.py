"""Whether to take an action of uncertain gain: draft in this step, run the network as well, train, record.

    act if the ledger covers the worst case, and mean + z * sd > 0

`GainPosterior` estimates one action's mean net gain; `RegretLedger` bounds what all actions together may lose, whatever
their posteriors say. `StepDecision` holds both for an action that is taken or left in each step. Where the gain is
clear the posterior decides and the ledger stays full; where it is not, finding out costs what the ledger holds, and
then a share of the time.
"""

import math
import threading
from collections.abc import Hashable, Sequence
from typing import Any

SHARE = 0.01
"""Share of serving time that may be lost in the long run."""
CAP_STEPS = 16.0
"""Steps that drafting, or asking one more drafter, may lose at once: 3 % of an answer of 512 tokens. With a variance of
1 step^2 per step what gains 10 %, with 1 % to lose, is at the end of them exp(-2 * 0.11 * 16) = 3 % of the time (a
reflected random walk)."""
TRIAL_STEPS = 8
"""Steps that the ledger must cover before a drafter follows a new sequence, half of the cap: fewer would say little,
and reading the prompt costs as well."""
_DOUBT = 2.0
"""z: of actions that neither gain nor lose anything one in 44 is given up by bad luck."""
_DRIFT = 1.0 / 128**2
"""Variance by which a mean moves per step, where noise is 1: the last 128 observations count, an answer's length. With
64 a loss of a fifth of a step would never be sure."""
_NOISE_PRIOR = 8.0
"""Observations that the presumed noise counts for."""
_NOISE_MEMORY = 128.0  # observations: as many as the mean remembers
_FARTHEST = 4.0  # standard deviations; no single observation, however odd, decides
_TIME_NOISE = 0.1
"""Standard deviation of a baseline's observation: the seconds of one step as a share of those expected."""
_TIME_DRIFT = _TIME_NOISE**2 / 512
"""After 512 steps without one a baseline is as uncertain as after its first."""


class GainPosterior:
    """Normal posterior of an action's mean net gain, in plain steps. The mean drifts; with r the variance of one
    observation, presumed or observed, whichever is larger (an action that never gains shows no noise),

        gain = mean + N(0, r);    mean <- mean + N(0, drift)  per step, observed or not

    a local level model (Durbin, Koopman, "Time Series Analysis by State Space Methods", 2012, section 2.2). Its Kalman
    filter weighs an observation by p / (p + r), p being the mean's variance: as in an average at first, and in the long
    run by about sqrt(drift / r). Without observations the mean stays and becomes as uncertain as at first.
    """

    def __init__(self, *, mean: float = 0.0, sd: float = 1.0, noise: float = 1.0, drift: float = _DRIFT) -> None:
        """`mean`, `sd`: the prior; `noise`: presumed standard deviation of one observation."""
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
        """Whether any observation of presumed noise was made."""
        return self._count > 0

    @property
    def noise(self) -> float:
        """Standard deviation of one observation."""
        return math.sqrt(self._noise)

    @property
    def may_gain(self) -> bool:
        """Whether the mean gain may be above 0."""
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
        """Set the mean's standard deviation to an earlier one, at most the prior's."""
        self._variance = min(self._first, sd * sd)

    def is_sign_known(self, deviation: float) -> bool:
        """Whether the sign of the mean is known after adding an error of this standard deviation."""
        return abs(self.mean) > _DOUBT * math.hypot(self.sd, deviation)

    def observe(self, gain: float, noise: float | None = None) -> None:
        """Update by the gain of one step; `noise`: standard deviation of this observation, where it is known."""
        variance = self._noise if noise is None else noise * noise
        farthest = _FARTHEST * math.sqrt(self._variance + variance)
        surprise = min(max(gain - self.mean, -farthest), farthest)
        weight = self._variance / (self._variance + variance)
        if noise is None:
            self._count += 1
            rate = 1.0 / min(self._count + _NOISE_PRIOR, _NOISE_MEMORY)
            # The part of the surprise that is noise.
            seen = self._noise + rate * (surprise * surprise * (1.0 - weight) - self._noise)
            self._noise = max(self._presumed, seen)
        self.mean += weight * surprise
        self._variance *= 1.0 - weight
        self.advance()

    def advance(self, steps: float = 1.0) -> None:
        """Let the mean drift for so many steps: it becomes less certain."""
        self._variance = min(self._first, self._variance + steps * self._drift)

    def widen(self, share: float = 1.0) -> None:
        """Add a share of the prior's variance, because weights or traffic changed; 1 makes the mean as uncertain as at
        first."""
        self._variance = min(self._first, self._variance + share * self._first)

    def state(self) -> list[float]:
        """Return mean, variance, noise and number of observations, for `restore`."""
        return [self.mean, self._variance, self._noise, float(self._count)]

    def restore(self, state: Sequence[float]) -> None:
        """Restore the result of `state`. Raises ValueError or TypeError for anything else."""
        mean, variance, noise, count = map(float, state)
        if not (math.isfinite(mean) and 0.0 < variance <= self._first and 0.0 < noise < math.inf and count >= 0):
            raise ValueError(f"{state} is not the state of a posterior")
        self.mean, self._variance, self._noise, self._count = mean, variance, noise, int(count)


class RegretLedger:
    """Bounds the losses of all actions of a server against never acting, in seconds of serving. Each account has a
    balance, at most its cap: every gain and loss of its actions is recorded, and a share of the time is added. An
    action whose worst case the balance does not cover is not taken. Thread-safe.

    Only losses are subtracted, hence balance(T) <= balance(0) + gains + share * T; and as no action lets it fall below
    0 by more than what was worse than its worst case, for any sequence of gains

        sum of gains >= -(caps + share * T + one action)
    """

    def __init__(self, *, share: float = SHARE) -> None:
        """`share`: share of serving time that is added to all accounts together."""
        self._share = share
        self._caps: dict[str, float] = {}
        self.balances: dict[str, float] = {}  # seconds by account
        self.lost_seconds: dict[str, float] = {}  # seconds by account; gains are not deducted
        self._lock = threading.Lock()

    def open(self, account: str, cap: float, balance: float | None = None) -> None:
        """Open an account, or reset it, with this balance, or with a full one; in seconds."""
        with self._lock:
            self._caps[account] = cap
            self.balances[account] = cap if balance is None else min(cap, balance)
            self.lost_seconds.setdefault(account, 0.0)

    def accrue(self, seconds: float) -> None:
        """Add the share of so much serving time; full accounts leave theirs to the others."""
        spare = self._share * seconds
        with self._lock:
            poorest_last = sorted(self._caps, key=lambda name: self._caps[name] - self.balances[name])
            for left, name in zip(range(len(poorest_last), 0, -1), poorest_last, strict=True):
                added = min(spare / left, max(0.0, self._caps[name] - self.balances[name]))
                self.balances[name] += added
                spare -= added

    def can_afford(self, account: str, worst_seconds: float) -> bool:
        """Whether the balance covers a loss of so much, or is full."""
        return self.balances[account] >= min(worst_seconds, self._caps[account])

    def record(self, account: str, gained_seconds: float) -> None:
        """Record a gain of this account's actions, a loss where negative."""
        with self._lock:
            self.balances[account] = min(self._caps[account], self.balances[account] + gained_seconds)
            self.lost_seconds[account] += max(0.0, -gained_seconds)

    def raise_cap(self, account: str, seconds: float) -> None:
        """Raise the account's cap to what one action costs, so that it can be afforded at all."""
        with self._lock:
            self._caps[account] = max(self._caps[account], seconds)


class StepDecision:
    """Whether to take an action in a step. Its gain, in plain steps, has a posterior for each key and size of batch,
    and so have the seconds of a step without it, the *baseline*. Accounts in the ledger bound its losses.

    Sizes of batches count in powers of two. A step's gain is a mean over its sequences, so its variance falls with
    their number. A new size begins with the mean of a neighbouring one.
    """

    def __init__(
        self, name: str, ledger: RegretLedger, *, noise: float = 1.0, baseline: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        """`name`: prefix of its accounts; `noise`: presumed standard deviation of one sequence's gain in one step;
        `baseline`: mean and standard deviation of each baseline before any observation."""
        self._name, self._ledger, self._noise, self._baseline = name, ledger, noise, baseline
        self._gains: dict[tuple[Hashable, int], GainPosterior] = {}
        self._baselines: dict[tuple[Hashable, int], GainPosterior] = {}
        self._accounts: dict[str, str] = {}  # their names in the ledger

    def gain(self, num_sequences: int, key: Hashable = None) -> GainPosterior:
        """The posterior of the gain for so many sequences, a new one if there is none."""
        size = num_sequences.bit_length()
        found = self._gains.get((key, size))
        if found is None:
            near = (self._gains.get((key, other)) for other in (size - 1, size + 1))
            neighbour = next((one for one in near if one is not None), None)
            mean, noise = neighbour.mean if neighbour else 0.0, self._noise * 2.0 ** (-(size - 1) / 2)
            drift = self._noise**2 * _DRIFT
            found = self._gains[key, size] = GainPosterior(mean=mean, noise=noise, drift=drift)
        return found

    def baseline(self, num_sequences: int, key: Hashable = None) -> GainPosterior:
        """The posterior of the time of a step of so many sequences without the action, a new one if there is none."""
        place = key, num_sequences.bit_length()
        if place not in self._baselines:
            mean, sd = self._baseline
            self._baselines[place] = GainPosterior(mean=mean, sd=sd, noise=_TIME_NOISE, drift=_TIME_DRIFT)
        return self._baselines[place]

    def may_gain(self, num_sequences: int, key: Hashable) -> bool | None:
        """Whether the action may gain for so many sequences; None where it was never observed."""
        known = self._gains.get((key, num_sequences.bit_length()))
        return None if known is None else known.may_gain

    @staticmethod
    def needs_baseline(gain: GainPosterior, deviation: float) -> bool:
        """Whether a step without the action would say more than one with it: the baseline's error, of this standard
        deviation, is the larger part of the doubt in a gain whose sign is unknown."""
        return deviation >= gain.sd and not gain.is_sign_known(deviation)

    def can_afford(self, account: str, steps: float, step_seconds: float) -> bool:
        """Whether the account covers the loss of so many steps; True before it is opened."""
        name = self._named(account)
        return name not in self._ledger.balances or self._ledger.can_afford(name, steps * step_seconds)

    def settle(self, account: str, gained_seconds: float, step_seconds: float) -> None:
        """Enter what a step gained, or lost where negative. The account is opened with a full balance once the seconds
        of a step are known; `step_seconds`: 0 where unknown."""
        name = self._named(account)
        if name not in self._ledger.balances:
            if not step_seconds:
                return
            self._ledger.open(name, CAP_STEPS * step_seconds)
        self._ledger.record(name, gained_seconds)

    def totals(self) -> tuple[float, float]:
        """Seconds that its accounts may still lose, and seconds lost by steps that lost, gains not deducted."""
        ledger, names = self._ledger, self._accounts.values()
        balances, losses = ([of.get(name, 0.0) for name in names] for of in (ledger.balances, ledger.lost_seconds))
        return sum(balances), sum(losses)

    def widen(self) -> None:
        """Make every mean as uncertain as at first, as other weights draft now."""
        for posterior in self._gains.values():
            posterior.widen()

    def state(self) -> dict[str, list[Any]]:
        """All posteriors as JSON, for `restore`."""
        gains = [[key, size, posterior.state()] for (key, size), posterior in self._gains.items()]
        return {"gains": gains, "plain": [[size, one.state()] for (_, size), one in self._baselines.items()]}

    def restore(self, state: dict[str, list[Any]], widened: float) -> None:
        """Continue from a state whose baselines have no keys, with gains widened by this share of the prior. Raises
        ValueError, KeyError or TypeError for anything else, and then changes nothing."""
        fresh = StepDecision(self._name, self._ledger, noise=self._noise, baseline=self._baseline)
        for size, posterior in state["plain"]:
            fresh.baseline(1 << (size - 1)).restore(posterior)
        for key, size, posterior in state["gains"]:
            found = fresh.gain(1 << (size - 1), key)
            found.restore(posterior)
            found.widen(widened)
        self._gains, self._baselines = fresh._gains, fresh._baselines

    def _named(self, account: str) -> str:
        return self._accounts.setdefault(account, f"{self._name} {account}")
