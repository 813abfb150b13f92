"""May something go on whose gain is uncertain? As long as it has earned its keep; after that, on pocket money.

The balance is counted in steps (the seconds of a plain one): gains fill it up to a limit, losses empty it. What has
lost it all is tried again whenever a small share of the time that passed has paid off the debt and saved up enough for
a trial: one lucky step is no evidence. So the loss against never having tried is bounded for any run: the allowance,
and that share of the time.
"""

import math

ALLOWANCE = 3.0
LIMIT = 8.0
SHARE = 0.01
TRIAL = 2.0
_WHOLE_FOR = 4  # sequences: what fewer gain is so uneven that a bad beginning must not decide
_SMALLEST = 0.25  # of a whole one, so that what has lost for many is not forgotten for minutes
_RENEWAL = 0.5  # of the first allowance; a successor is much like what it replaces


class Purse:
    """One balance."""

    def __init__(
        self, *, allowance: float = ALLOWANCE, limit: float = LIMIT, share: float = SHARE, trial: float = TRIAL
    ) -> None:
        """Plain steps: what it begins with, the most it can have, what each step without it adds, and what it takes to
        open again."""
        self._balance = allowance
        self._limit = limit
        self._share = share
        self._trial = trial
        self._is_open = allowance > 0.0

    @property
    def balance(self) -> float:
        """In plain steps; below 0 a debt."""
        return self._balance

    @property
    def is_open(self) -> bool:
        """Whether it may go on."""
        return self._is_open

    def opens_within(self, steps: int) -> bool:
        """Whether it is open, or will be after so many steps without it."""
        return self._is_open or self._balance + steps * self._share >= self._trial

    def rest(self) -> None:
        """A step went by without it."""
        self.settle(self._share)

    def renew(self, allowance: float) -> None:
        """Something else is behind it from now on: it has at least so much to be tried with."""
        self._balance = max(self._balance, allowance)
        self._is_open = self._is_open or self._balance > 0.0

    def settle(self, gain: float) -> None:
        """A step went by with it, which gained so many plain steps, or lost them where it is negative."""
        self._balance = min(self._limit, self._balance + gain)
        self._is_open = self._balance > 0.0 if self._is_open else self._balance >= self._trial


class PursesBySize:
    """One purse for each size of batch, in powers of two.

    A step's gain is a mean over its sequences, whose variance falls as one over their number, and with it what it
    takes to tell a gain from a loss: the more sequences, the smaller the purse and the share of the time that fills
    it. For few only what was earned lasts longer, so that no run loses more against never having tried; with the
    purse of four, what gains 15 % of a step would stand down half the time for one. And what has lost its purse for
    many begins with that debt for twice as many, whose rows a forward has less room for.
    """

    def __init__(self, *, allowance: float = ALLOWANCE) -> None:
        self._allowance = allowance
        self._purses: dict[int, Purse] = {}

    def of(self, num_sequences: int) -> Purse:
        size = num_sequences.bit_length()
        if size not in self._purses:
            part = _part(size)
            allowance = min(part * self._allowance, self._debt(size - 1))
            limit = _weight(size) * LIMIT
            self._purses[size] = Purse(allowance=allowance, limit=limit, share=part * SHARE, trial=part * TRIAL)
        return self._purses[size]

    def renew(self) -> None:
        """Something else is behind them all from now on: what was lost says little of it."""
        for size, purse in self._purses.items():
            purse.renew(_RENEWAL * _part(size) * self._allowance)

    def _debt(self, size: int) -> float:
        """The balance of a purse that is closed; infinite where it says nothing of other sizes."""
        purse = self._purses.get(size)
        if purse is None or purse.is_open or 2 ** (size - 1) <= _WHOLE_FOR:
            return math.inf
        return min(0.0, purse.balance)


def _part(size: int) -> float:
    """Of a whole purse, for batches of so many bits."""
    return min(1.0, _weight(size))


def _weight(size: int) -> float:
    """How unevenly so many gain, four being 1."""
    return max(_SMALLEST, _WHOLE_FOR / (1 << (size - 1)))
