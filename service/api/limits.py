"""Counters of what an API key has used: per minute in buckets that refill, per calendar month in a file that survives
restarts. `tenants` decides what is refused, and how.

The file is written every two seconds while tokens are used, and at the end. A killed process therefore loses the
counts since the last write, and what its running answers were still going to use.
"""

import asyncio
import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from drafters.files import lock, replace_file
from service.errors import StartupError

logger = logging.getLogger(__name__)

BUDGETS_FILE = "budgets.json"
SAVE_SECONDS = 2.0

Clock = Callable[[], float]  # seconds, from any beginning

_MINUTE_SECONDS = 60
_SLACK = 1e-6  # rounding error of summed refills


class _Limit(ABC):
    """A limit, and the sum of what running requests have reserved of it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._reserved = 0

    @property
    @abstractmethod
    def remaining(self) -> int:
        """The amount that can be reserved now."""

    def reserve(self, amount: int) -> None:
        """Set aside the most that a request may use; the caller has checked that it remains."""
        assert amount <= self.remaining, "the caller checks"
        self._reserved += amount

    def release(self, amount: int) -> None:
        """Give back an unused part of a reservation."""
        self._reserved -= amount


class PerMinute(_Limit):
    """A limit per minute: a bucket that refills continuously.

    The level is at most `limit` and grows by `limit / 60` per second. Admitting a request reserves the most it may use,
    provided that the level covers all reservations: `reserved <= level`. Using an amount lowers both; the end of the
    request releases the rest of its reservation. Over any T seconds, therefore,

        used + reserved at the end <= level at the beginning + limit * T / 60 <= limit * (1 + T / 60).

    So an idle key may start with a burst of one minute's worth, and concurrent requests overrun the limit by no more
    than one of them alone: a request that may use more than a minute's worth reserves it all, and what it then uses
    beyond is a debt (a level below 0), which refills before the key's next request is admitted.
    """

    def __init__(self, limit: int, *, clock: Clock) -> None:
        super().__init__(limit)
        self._clock = clock
        self._level = float(limit)
        self._read_at = clock()  # seconds

    @property
    def remaining(self) -> int:
        """The amount that can be reserved now."""
        return max(0, math.floor(self._free() + _SLACK))

    @property
    def reset_seconds(self) -> float:
        """Seconds until the bucket is full, if every reservation is used."""
        return self.seconds_until(self.limit)

    def seconds_until(self, amount: int) -> float:
        """Seconds until `amount` can be reserved, if every reservation is used."""
        return max(0.0, amount - self._free() - _SLACK) * _MINUTE_SECONDS / self.limit

    def use(self, amount: int, *, reserved: int) -> None:
        """Use an amount, of which so much was reserved."""
        self._refill()
        self._reserved -= reserved
        self._level -= amount

    def _free(self) -> float:
        self._refill()
        return self._level - self._reserved

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._read_at) * self.limit / _MINUTE_SECONDS)
        self._read_at = now


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    month: str
    used_tokens: dict[str, NonNegativeInt]


class MonthlyUse:
    """Tokens used by each account in this calendar month (UTC). Used on the event loop only."""

    def __init__(self, folder: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Read the counts of an earlier process. Raises StartupError if that fails, or another server has the file."""
        self._now = now
        self._file = folder / BUDGETS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self._file.with_suffix(".lock"))
            saved = _read(self._file)
        except BlockingIOError:
            message = f"another server keeps its budgets in {folder}; give this one a state_dir of its own"
            raise StartupError(message) from None
        except OSError as error:
            raise StartupError(f"budgets cannot be kept in {folder}: {error}; change state_dir") from error
        self._month, self._used = (self._this_month(), {}) if saved is None else (saved.month, saved.used_tokens)
        self._changed = False
        self._write_failed = False  # and has been logged

    def of(self, account: str) -> int:
        """Tokens that an account has used."""
        self._start_month()
        return self._used.get(account, 0)

    def add(self, account: str, tokens: int) -> None:
        """Count tokens that an account has used."""
        self._start_month()
        self._used[account] = self._used.get(account, 0) + tokens
        self._changed = True

    @property
    def next_month(self) -> tuple[str, float]:
        """The start of the next month as text, and the seconds until then."""
        now = self._now()
        begins = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
        return f"{begins:%Y-%m-%dT%H:%M:%SZ}", (begins - now).total_seconds()

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Write the counts to the file while the block runs, and at its end."""
        ending = asyncio.Event()
        saving = asyncio.create_task(self._save_until(ending))
        try:
            yield
        finally:
            ending.set()
            await saving
            await self._save()
            os.close(self._lock)

    async def _save_until(self, ending: asyncio.Event) -> None:
        while not ending.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), SAVE_SECONDS)
            await self._save()

    async def _save(self) -> None:
        if not self._changed:
            return
        self._changed = False
        data = json.dumps({"month": self._month, "used_tokens": self._used}).encode()
        try:
            await asyncio.to_thread(replace_file, self._file, data)  # a slow disk must not delay the streams
        except OSError as error:
            if not self._write_failed:
                logger.error("budgets are counted but cannot be written to %s: %s", self._file, error)
            self._changed = self._write_failed = True
        else:
            self._write_failed = False

    def _start_month(self) -> None:
        if (month := self._this_month()) != self._month:
            self._month, self._used, self._changed = month, {}, True

    def _this_month(self) -> str:
        return f"{self._now():%Y-%m}"


class PerMonth(_Limit):
    """A limit of tokens per calendar month (UTC), with reservations as in `PerMinute`."""

    def __init__(self, limit: int, use: MonthlyUse, account: str) -> None:
        super().__init__(limit)
        self._use = use
        self._account = account

    @property
    def used(self) -> int:
        """Tokens used this month."""
        return self._use.of(self._account)

    @property
    def remaining(self) -> int:
        """Tokens that can be reserved now."""
        return max(0, self.limit - self.used - self._reserved)

    @property
    def next_month(self) -> tuple[str, float]:
        """The start of the next month as text, and the seconds until then."""
        return self._use.next_month

    def use(self, amount: int, *, reserved: int) -> None:
        """Use an amount, of which so much was reserved."""
        self._reserved -= reserved
        self._use.add(self._account, amount)


def duration(seconds: float) -> str:
    """A duration in the form of OpenAI's headers, rounded up: `0s`, `12ms`, `1s`, `8.64s`, `6m0s`, `1h0m5.5s`."""
    milliseconds = math.ceil(seconds * 1000 - _SLACK)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds > 0 else "0s"
    minutes, milliseconds = divmod(milliseconds, _MINUTE_SECONDS * 1000)
    rest = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    hours, minutes_left = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes_left}m" if minutes else "") + rest


def _read(file: Path) -> _Saved | None:
    if not file.exists():
        return None
    try:
        return _Saved.model_validate_json(file.read_bytes())
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        message = f"the budgets in {file} cannot be read: {reason}; remove the file to begin this month with none used"
        raise StartupError(message) from error
