"""Whether an action of uncertain gain is worth taking: draft in this step, ask the network as well, train, record.

    act if the ledger covers the worst case, and mean + z * sd > 0

`GainPosterior` is what is known of one action's mean net gain; `RegretLedger` is what all of them may lose together,
whatever they believe of themselves. Where the gain is clear the posterior decides and the ledger stays full; where it
is not, finding out costs what the ledger holds, and then a share of the time.
"""

import math
import threading
from collections.abc import Collection, Hashable, Sequence

SHARE = 0.01
"""Of serving time, that may be lost in the long run."""
CAP_STEPS = 16.0
"""Steps that drafting, or asking one more drafter, may lose at once: 3 % of an answer of 512 tokens. With a variance of
1 step^2 per step what gains 10 %, with 1 % to lose, is at the end of them exp(-2 * 0.11 * 16) = 3 % of the time (a
reflected random walk)."""
TRIAL_STEPS = 8
"""That must be covered for a text to be followed, half of the cap: less of it would say little, and its prompt costs as
well."""
_DOUBT = 2.0
"""z: of actions that neither gain nor cost anything one in 44 is given up by bad luck."""
_DRIFT = 1.0 / 128**2
"""Variance by which a mean moves per step, where noise is 1: the last 128 observations count, an answer's length. With
64 a loss of a fifth of a step would never be sure."""
_NOISE_PRIOR = 8.0
"""Observations that the presumed noise weighs."""
_NOISE_MEMORY = 128.0  # observations: as many as the mean remembers
_FARTHEST = 4.0  # standard deviations; no single observation, however odd, decides


class GainPosterior:
    """Normal posterior of an action's mean net gain, in plain steps. The mean drifts; with r the variance of one
    observation, presumed or seen, whichever is larger (what never gains shows no noise, and nothing of other texts),

        gain = mean + N(0, r);    mean <- mean + N(0, drift)  per step, observed or not

    a local level model (Durbin, Koopman, "Time Series Analysis by State Space Methods", 2012, section 2.2). Its Kalman
    filter weighs an observation by p / (p + r), p being the mean's variance: as in an average at first, and in the long
    run by about sqrt(drift / r). What is not observed for long becomes as uncertain as it was, and keeps its mean.
    """

    def __init__(self, *, mean: float = 0.0, sd: float = 1.0, noise: float = 1.0, drift: float = _DRIFT) -> None:
        """`mean`, `sd`: what is known before anything is observed; `noise`: presumed deviation of one observation."""
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
    def noise(self) -> float:
        """Standard deviation of one observation."""
        return math.sqrt(self._noise)

    @property
    def promises(self) -> bool:
        """Whether the mean gain may be above 0, as far as is known."""
        return self.best_case > 0.0

    @property
    def best_case(self) -> float:
        """What the mean gain may be at best, as far as is known."""
        return self.mean + _DOUBT * self.sd

    @property
    def worst_case(self) -> float:
        """What it is at least."""
        return self.mean - _DOUBT * self.sd

    def believe(self, sd: float) -> None:
        """The mean is as sure as it was found to be before."""
        self._variance = min(self._first, sd * sd)

    def is_sure_beside(self, deviation: float) -> bool:
        """Whether the gain's sign is known, with something of this standard deviation added."""
        return abs(self.mean) > _DOUBT * math.hypot(self.sd, deviation)

    def observe(self, gain: float, noise: float | None = None) -> None:
        """Take in what one step gained; `noise`: the deviation of this very observation, where it is known."""
        variance = self._noise if noise is None else noise * noise
        farthest = _FARTHEST * math.sqrt(self._variance + variance)
        surprise = min(max(gain - self.mean, -farthest), farthest)
        weight = self._variance / (self._variance + variance)
        if noise is None:
            self._count += 1
            rate = 1.0 / min(self._count + _NOISE_PRIOR, _NOISE_MEMORY)
            # As much of the surprise as is noise.
            seen = self._noise + rate * (surprise * surprise * (1.0 - weight) - self._noise)
            self._noise = max(self._presumed, seen)
        self.mean += weight * surprise
        self._variance *= 1.0 - weight
        self.elapse()

    def elapse(self, steps: float = 1.0) -> None:
        """So many steps went by."""
        self._variance = min(self._first, self._variance + steps * self._drift)

    def widen(self, share: float = 1.0) -> None:
        """The action may gain otherwise from now on, with other weights or traffic: its mean is as uncertain as at
        first, or by a share of that variance more than it was."""
        self._variance = min(self._first, self._variance + share * self._first)

    def state(self) -> list[float]:
        """Mean, variance, noise and number of observations, for `restore`."""
        return [self.mean, self._variance, self._noise, float(self._count)]

    def restore(self, state: Sequence[float]) -> None:
        """Raises ValueError, TypeError for what `state` did not return."""
        mean, variance, noise, count = map(float, state)
        if not (math.isfinite(mean) and 0.0 < variance <= self._first and 0.0 < noise < math.inf and count >= 0):
            raise ValueError(f"{state} is no state of a posterior")
        self.mean, self._variance, self._noise, self._count = mean, variance, noise, int(count)


class PosteriorsBySize:
    """A posterior for each size of batch, in powers of two, and whatever else matters: a step's gain is a mean over its
    sequences, so that its variance falls with their number. A size never seen begins with its neighbour's mean."""

    def __init__(self, noise: float = 1.0) -> None:
        """`noise`: presumed deviation of one observation of one sequence."""
        self._noise = noise
        self._known: dict[tuple[Hashable, int], GainPosterior] = {}

    def of(self, num_sequences: int, kind: Hashable = None) -> GainPosterior:
        size = num_sequences.bit_length()
        found = self._known.get((kind, size))
        if found is None:
            near = (self._known.get((kind, other)) for other in (size - 1, size + 1))
            neighbour = next((one for one in near if one is not None), None)
            mean, noise = neighbour.mean if neighbour else 0.0, self._noise * 2.0 ** (-(size - 1) / 2)
            drift = self._noise**2 * _DRIFT
            found = self._known[kind, size] = GainPosterior(mean=mean, noise=noise, drift=drift)
        return found

    def state(self) -> list[tuple[Hashable, int, list[float]]]:
        """Kind, size of batch and posterior of each, for `restore`."""
        return [(kind, size, posterior.state()) for (kind, size), posterior in self._known.items()]

    def restore(self, state: Sequence[tuple[Hashable, int, Sequence[float]]], widened: float) -> None:
        """Take up what `state` returned, its means less sure by this share of what is known of a new one. Raises
        ValueError, TypeError for anything else."""
        for kind, size, posterior in state:
            found = self.of(1 << (size - 1), kind)
            found.restore(posterior)
            found.widen(widened)

    def promises(self, num_sequences: int, kinds: Collection[Hashable]) -> bool:
        """Whether any of these kinds does for so many sequences; where none of them is known, they do."""
        known = (self._known.get((kind, num_sequences.bit_length())) for kind in kinds)
        found = [one for one in known if one is not None]
        return not found or any(one.promises for one in found)

    def widen(self) -> None:
        for posterior in self._known.values():
            posterior.widen()


class RegretLedger:
    """What all actions of a server together may have lost against never acting, in seconds of serving. Each account has
    a balance, at most its cap: whatever an action gains or loses is entered, exploited or explored, and a share of the
    time is added. What the balance does not cover is not done. May be called from any thread.

    Nothing is ever taken away but losses, hence balance(T) <= balance(0) + gains + share * T; and as no action lets it
    fall below 0 by more than what was worse than its worst case, for any sequence of gains

        sum of gains >= -(caps + share * T + one action)
    """

    def __init__(self, *, share: float = SHARE) -> None:
        """`share`: of the time, for all accounts together."""
        self._share = share
        self._caps: dict[str, float] = {}
        self.balances: dict[str, float] = {}  # by account, as all below
        self.lost_seconds: dict[str, float] = {}  # what was gained not deducted
        self._lock = threading.Lock()

    def open(self, account: str, cap: float, balance: float | None = None) -> None:
        """Begin an account, or begin it anew, with this balance or with all that it may hold; in seconds."""
        with self._lock:
            self._caps[account] = cap
            self.balances[account] = cap if balance is None else min(cap, balance)
            self.lost_seconds.setdefault(account, 0.0)

    def elapse(self, seconds: float) -> None:
        """So much serving time went by. What a full account does not need is the others'."""
        spare = self._share * seconds
        with self._lock:
            poorest_last = sorted(self._caps, key=lambda name: self._caps[name] - self.balances[name])
            for left, name in zip(range(len(poorest_last), 0, -1), poorest_last, strict=True):
                added = min(spare / left, max(0.0, self._caps[name] - self.balances[name]))
                self.balances[name] += added
                spare -= added

    def covers(self, account: str, worst_seconds: float) -> bool:
        """Whether something that may cost so much can be afforded."""
        return self.balances[account] >= min(worst_seconds, self._caps[account])

    def settle(self, account: str, gained_seconds: float) -> None:
        """An action of this account gained so much, or lost it where it is negative."""
        with self._lock:
            self.balances[account] = min(self._caps[account], self.balances[account] + gained_seconds)
            self.lost_seconds[account] += max(0.0, -gained_seconds)

    def raise_cap(self, account: str, seconds: float) -> None:
        """An action of this account turned out to cost so much: it must be possible to afford one."""
        with self._lock:
            self._caps[account] = max(self._caps[account], seconds)


class StepAccount:
    """An account that is counted in steps, opened with all that it may hold once it is known what one takes."""

    def __init__(self, name: str, ledger: RegretLedger) -> None:
        self._name, self._ledger = name, ledger

    @property
    def balance_seconds(self) -> float:
        return self._ledger.balances.get(self._name, 0.0)

    @property
    def lost_seconds(self) -> float:
        return self._ledger.lost_seconds.get(self._name, 0.0)

    def covers(self, steps: float, step_seconds: float) -> bool:
        """Whether so many steps can be afforded; before it is opened they can."""
        return self._name not in self._ledger.balances or self._ledger.covers(self._name, steps * step_seconds)

    def settle(self, gained_seconds: float, step_seconds: float) -> None:
        """Enter what was gained, or lost; `step_seconds`: 0 where nothing is known of what steps take."""
        if self._name not in self._ledger.balances:
            if not step_seconds:
                return
            self._ledger.open(self._name, CAP_STEPS * step_seconds)
        self._ledger.settle(self._name, gained_seconds)
