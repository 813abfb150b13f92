"""What a key may use: so much a minute, so much a month. Counts only; who is refused how is told in `tenants`."""

import math
from collections.abc import Callable

from service.api.budgets import MonthlyUse

Clock = Callable[[], float]  # seconds, from any beginning

_MINUTE_SECONDS = 60
_SLACK = 1e-6  # what sums of refills may lack of a whole one


class PerMinute:
    """So many a minute, from a bucket that refills all the time.

    The bucket's level is at most `limit` and grows by `limit / 60` a second. What a request may use at most is held
    when it is admitted, and only what the level has beyond all that is held already: `held <= level`. What it uses is
    taken from both as it is used; the rest of its hold is let go at its end. Over any T seconds, therefore,

        used + held at the end <= level at the beginning + limit * T / 60 <= limit * (1 + T / 60).

    So requests side by side never overrun it, and a key that was idle may begin with a burst of one minute's worth.
    """

    def __init__(self, limit: int, *, clock: Clock) -> None:
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._read_at = clock()  # seconds
        self._held = 0

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self._free() + _SLACK))

    @property
    def reset_seconds(self) -> float:
        """Until all of it is there again, if what is held is used."""
        return self.seconds_until(self.limit)

    def seconds_until(self, amount: int) -> float:
        """Until so many are free, if what is held is used."""
        return max(0.0, amount - self._free() - _SLACK) * _MINUTE_SECONDS / self.limit

    def hold(self, amount: int) -> None:
        assert amount <= self.remaining, "checked by whoever admits"
        self._held += amount

    def use(self, amount: int) -> None:
        """Of what is held."""
        self._refill()
        self._held -= amount
        self._level -= amount

    def let_go(self, amount: int) -> None:
        self._held -= amount

    def _free(self) -> float:
        self._refill()
        return self._level - self._held

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._read_at) * self.limit / _MINUTE_SECONDS)
        self._read_at = now


class PerMonth:
    """So many tokens in a calendar month, UTC. What a request may use at most is held like in a minute's bucket."""

    def __init__(self, limit: int, use: MonthlyUse, account: str) -> None:
        self.limit = limit
        self._use = use
        self._account = account
        self._held = 0

    @property
    def used(self) -> int:
        return self._use.of(self._account)

    @property
    def remaining(self) -> int:
        return max(0, self.limit - self.used - self._held)

    @property
    def next_month(self) -> tuple[str, float]:
        """When it begins, in words, and the seconds until then."""
        return self._use.next_month

    def hold(self, amount: int) -> None:
        assert amount <= self.remaining, "checked by whoever admits"
        self._held += amount

    def use(self, amount: int) -> None:
        """Of what is held."""
        self._held -= amount
        self._use.add(self._account, amount)

    def let_go(self, amount: int) -> None:
        self._held -= amount


def duration(seconds: float) -> str:
    """As OpenAI's API writes it: `0s`, `12ms`, `1s`, `8.64s`, `6m0s`, `1h0m5.5s`; never shorter than it is."""
    milliseconds = math.ceil(seconds * 1000 - _SLACK)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds > 0 else "0s"
    minutes, milliseconds = divmod(milliseconds, _MINUTE_SECONDS * 1000)
    rest = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    hours, minutes_left = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes_left}m" if minutes else "") + rest
