"""May something go on whose gain is uncertain? As long as it has earned its keep; after that, on pocket money.

The balance is counted in steps (the seconds of a plain one): gains fill it up to a limit, losses empty it. What has
lost it all is tried again whenever a small share of the time that passed has paid off the debt. So the loss against
never having tried is bounded for any run: the allowance, and that share of the time.
"""

ALLOWANCE = 3.0
DOUBTFUL = 0.2
"""What is left of allowance and share where the same does not clearly pay for half as many sequences."""
LIMIT = 8.0
SHARE = 0.01
_DOUBTED_FROM = 4  # bits, so 8 sequences: fewer gain so much that a noisy beginning must not decide for all


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

    @property
    def is_full(self) -> bool:
        """Whether it has clearly gained of late."""
        return self._balance > self._limit / 2

    def rest(self, doubt: float = 1.0) -> None:
        """A step went by without it; such a share of the usual pays off debts."""
        self._balance = min(self._limit, self._balance + doubt * self._share)

    def settle(self, gain: float) -> None:
        """A step went by with it, which gained so many plain steps, or lost them where it is negative."""
        self._balance = min(self._limit, self._balance + gain)


class PursesBySize:
    """One purse for each size of batch, in powers of two.

    What does not clearly pay for few sequences begins with little for more of them, and is tried again less often: rows
    that are verified cost more the more there are, and gain no more.
    """

    def __init__(self, *, allowance: float = ALLOWANCE) -> None:
        self._allowance = allowance
        self._purses: dict[int, Purse] = {}

    def of(self, num_sequences: int) -> Purse:
        size = num_sequences.bit_length()
        if size not in self._purses:
            self._purses[size] = Purse(allowance=self._allowance * self._doubt(size))
        return self._purses[size]

    def rest(self, num_sequences: int) -> None:
        """A step of so many went by without it."""
        self.of(num_sequences).rest(self._doubt(num_sequences.bit_length()))

    def _doubt(self, size: int) -> float:
        smaller = self._purses.get(size - 1) if size >= _DOUBTED_FROM else None
        return DOUBTFUL if smaller is not None and not smaller.is_full else 1.0
