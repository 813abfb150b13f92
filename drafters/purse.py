"""May something go on whose gain is uncertain? As long as it has earned its keep; after that, on pocket money.

The balance is counted in steps (the seconds of a plain one): gains fill it up to a limit, losses empty it. What has
lost it all is tried again whenever a small share of the time that passed has paid off the debt. So the loss against
never having tried is bounded for any run: the allowance, and that share of the time.
"""

ALLOWANCE = 3.0
LIMIT = 8.0
SHARE = 0.01
_WHOLE_FOR = 4  # sequences: what fewer gain is so uneven that a bad beginning must not decide
_SMALLEST = 0.25  # of a whole one, so that what has lost for many is not forgotten for minutes


class Purse:
    """One balance."""

    def __init__(self, *, allowance: float = ALLOWANCE, limit: float = LIMIT, share: float = SHARE) -> None:
        self._balance = allowance
        self._limit = limit
        self._share = share

    @property
    def balance(self) -> float:
        """In plain steps; below 0 a debt."""
        return self._balance

    @property
    def is_open(self) -> bool:
        """Whether it may go on."""
        return self._balance > 0.0

    def rest(self) -> None:
        """A step went by without it."""
        self.settle(self._share)

    def settle(self, gain: float) -> None:
        """A step went by with it, which gained so many plain steps, or lost them where it is negative."""
        self._balance = min(self._limit, self._balance + gain)


class PursesBySize:
    """One purse for each size of batch, in powers of two.

    A step's gain is a mean over its sequences, whose variance falls as one over their number, and with it what it takes
    to tell a gain from a loss: the more sequences, the smaller the purse and the share of the time that fills it.
    """

    def __init__(self, *, allowance: float = ALLOWANCE) -> None:
        self._allowance = allowance
        self._purses: dict[int, Purse] = {}

    def of(self, num_sequences: int) -> Purse:
        size = num_sequences.bit_length()
        if size not in self._purses:
            part = max(_SMALLEST, min(1.0, _WHOLE_FOR / 2 ** (size - 1)))
            self._purses[size] = Purse(allowance=part * self._allowance, limit=part * LIMIT, share=part * SHARE)
        return self._purses[size]
