"""May something go on whose gain is uncertain? As long as it has earned its keep; after that, on pocket money.

The balance is counted in steps (the seconds of a plain one): gains fill it up to a limit, losses empty it. What has
lost it all is tried again whenever a small share of the time that passed has paid off the debt. So the loss against
never having tried is bounded for any run: the allowance, and that share of the time.
"""

ALLOWANCE = 3.0
LIMIT = 8.0
SHARE = 0.01


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
        self._balance = min(self._limit, self._balance + self._share)

    def settle(self, gain: float) -> None:
        """A step went by with it, which gained so many plain steps, or lost them where it is negative."""
        self._balance = min(self._limit, self._balance + gain)
