"""API keys and their limits: admission, reservation of tokens, and refusals.

Limits per minute are buckets that refill; tokens per month are counted in a file. While tokens are used it is written
every two seconds, and at shutdown; a killed process loses the counts since then, and the tokens of running answers.
Everything here runs on the event loop and counts the requests of this process only.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from drafters.files import lock, replace_file
from service.api_keys import ApiKey, digest_in
from service.errors import InvalidRequest, QuotaUsedUp, RequestError, RequestLimit, StartupError, TokenLimit

logger = logging.getLogger(__name__)

BUDGETS_FILE = "budgets.json"
SAVE_SECONDS = 2.0

Clock = Callable[[], float]  # seconds since an arbitrary time

_CODE, _QUOTA_CODE = "rate_limit_exceeded", "insufficient_quota"
_SOON_SECONDS = 1  # retry delay after which running requests may have released their reservations
_MINUTE_SECONDS = 60
_SLACK = 1e-6  # rounding error of summed refills


class _Limit(ABC):
    """Base of the limits of an API key. Running requests reserve parts of a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._reserved = 0

    @property
    @abstractmethod
    def remaining(self) -> int:
        """The amount that can be reserved now."""

    def reserve(self, amount: int) -> None:
        """Reserve the most that a request may use; the caller has checked that `remaining` covers it."""
        assert amount <= self.remaining, "the caller checks"
        self._reserved += amount

    def release(self, amount: int) -> None:
        """Release the unused part of a reservation."""
        self._reserved -= amount


class PerMinute(_Limit):
    """A limit per minute: a bucket that refills continuously.

    The level is at most `limit` and grows by `limit / 60` per second. Admitting a request reserves the most it may use,
    provided that the level covers all reservations: `reserved <= level`. Using an amount lowers both; the end of the
    request releases the rest of its reservation. Over any T seconds, therefore,

        used + reserved at the end <= level at the beginning + limit * T / 60 <= limit * (1 + T / 60).

    So an idle key may start with a burst of one minute's worth, and concurrent requests overrun the limit by no more
    than one of them alone: a request that may use more than a minute's worth reserves the whole limit, and tokens
    beyond it are a debt (a level below 0), which refills before the key's next request is admitted.
    """

    def __init__(self, limit: int, *, clock: Clock) -> None:
        super().__init__(limit)
        self._clock = clock
        self._level = float(limit)
        self._read_at = clock()  # time of the last refill

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self._free() + _SLACK))

    @property
    def reset_seconds(self) -> float:
        """Seconds until the bucket is full, if every reservation is used."""
        return self.seconds_until(self.limit)

    def seconds_until(self, amount: int) -> float:
        """Seconds until `amount` can be reserved, if every reservation is used."""
        return max(0.0, amount - self._free() - _SLACK) * _MINUTE_SECONDS / self.limit

    def use(self, amount: int, *, reserved: int) -> None:
        """Charge an amount, of which `reserved` was reserved."""
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
        """Read the counts of an earlier process. Raises StartupError if that fails or another server uses the file."""
        self._now = now
        self._file = folder / BUDGETS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self._file.with_suffix(".lock"))
            saved = _read(self._file)
        except BlockingIOError:
            message = f"another server keeps its budgets in {folder}; give this one its own state_dir"
            raise StartupError(message) from None
        except OSError as error:
            raise StartupError(f"budgets cannot be kept in {folder}: {error}; change state_dir") from error
        self._month, self._used = (self._this_month(), {}) if saved is None else (saved.month, saved.used_tokens)
        self._changed = False
        self._write_failed = False  # the last write failed, and this was logged

    def of(self, account: str) -> int:
        """Return the tokens that an account has used this month."""
        self._start_month()
        return self._used.get(account, 0)

    def add(self, account: str, tokens: int) -> None:
        """Count tokens that an account has used."""
        self._start_month()
        self._used[account] = self._used.get(account, 0) + tokens
        self._changed = True

    @property
    def next_month(self) -> tuple[str, float]:
        """Start of the next month as text, and the seconds until then."""
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
                logger.error("cannot write token budgets to %s: %s; a restart would lose the counts", self._file, error)
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
        self.months = use
        self._account = account

    @property
    def used(self) -> int:
        """Tokens used this month."""
        return self.months.of(self._account)

    @property
    def remaining(self) -> int:
        return max(0, self.limit - self.used - self._reserved)

    def use(self, amount: int, *, reserved: int) -> None:
        """Charge an amount, of which `reserved` was reserved."""
        self._reserved -= reserved
        self.months.add(self._account, amount)


def duration(seconds: float) -> str:
    """Format a duration as in OpenAI's headers, rounded up: `0s`, `12ms`, `1s`, `8.64s`, `6m0s`, `1h0m5.5s`."""
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
        message = f"the budgets in {file} cannot be read: {reason}; remove the file to count this month again from 0"
        raise StartupError(message) from error


class Tenant:
    """API key with its limits and its current use."""

    def __init__(self, key: ApiKey, use: MonthlyUse | None, refusals: Counter[str], *, clock: Clock) -> None:
        """`refusals`: counts refused requests by `reason:name of the key`."""
        self.digest = digest_in(key.key)
        self.name = key.name or ""
        self._refusals = refusals
        requests, tokens, budget = key.requests_per_minute, key.tokens_per_minute, key.budget_tokens
        self._requests = None if requests is None else PerMinute(requests, clock=clock)
        self._tokens = None if tokens is None else PerMinute(tokens, clock=clock)
        # A budget is stored under the key's name, or under a hash of its hash, which no client can send as a key.
        account = self.name or "sha256:" + hashlib.sha256(self.digest).hexdigest()[:16]
        self._budget = None if use is None or budget is None else PerMonth(budget, use, account)
        self.max_concurrent = key.max_concurrent
        self.num_running = 0

    @property
    def headers(self) -> dict[str, str]:
        """Response headers `x-ratelimit-*` for the limits per minute."""
        found: dict[str, str] = {}
        for name, limit in (("requests", self._requests), ("tokens", self._tokens)):
            if limit is not None:
                found[f"x-ratelimit-limit-{name}"] = str(limit.limit)
                found[f"x-ratelimit-remaining-{name}"] = str(limit.remaining)
                found[f"x-ratelimit-reset-{name}"] = duration(limit.reset_seconds)
        return found

    def admit(self) -> "AdmittedRequest":
        """Admit a request of this key; it counts as running until its `end`. Raises RequestLimit."""
        if self.max_concurrent is not None and self.num_running >= self.max_concurrent:
            what = f"concurrent requests: Limit {self.max_concurrent}, Running {self.num_running}, Requested 1"
            raise self._refusal("concurrency", RequestLimit, what, _SOON_SECONDS)
        if (limit := self._requests) is not None:
            if limit.remaining < 1:
                what = f"requests per min (RPM): Limit {limit.limit}, Used {limit.limit - limit.remaining}, Requested 1"
                raise self._refusal("requests", RequestLimit, what, limit.seconds_until(1))
            limit.reserve(1)
            limit.use(1, reserved=1)
        self.num_running += 1
        return AdmittedRequest(self)

    def _refusal(self, reason: str, error: type[RequestError], what: str, wait_seconds: float) -> RequestError:
        """Count a refusal after which a retry may succeed, and return its error."""
        self._refusals[f"{reason}:{self.name}"] += 1
        wait = _whole(wait_seconds)
        message = f"Rate limit reached for this API key on {what}. Please try again in {duration(wait)}."
        return error(message, code=_CODE, retry_after_seconds=wait)

    def reserve(self, prompts: int, answers: int, *, param: str) -> "dict[PerMinute | PerMonth, int]":
        """Reserve the most tokens that a request may use, but per minute at most the whole limit, because answers are
        seldom as long as they may be. Returns the reserved tokens by limit. Raises InvalidRequest if the request can
        never fit (naming `param`, which bounds the answer, if that would help), else TokenLimit or QuotaUsedUp."""
        # 400, not 429: clients repeat a 429, and this request could never be admitted.
        tokens, found = prompts + answers, dict[PerMinute | PerMonth, int]()
        if (budget := self._budget) is not None:
            if tokens > budget.limit:
                raise self._too_large(f"{budget.limit} tokens per month", tokens, param, reason="budget")
            if tokens > budget.remaining:
                raise self._beyond_budget(tokens, budget)
            found[budget] = tokens
        if (limit := self._tokens) is not None:
            if prompts > limit.limit:
                raise self._too_large(f"{limit.limit} tokens per minute", prompts, None, reason="tokens")
            found[limit] = min(tokens, limit.limit)
            if found[limit] > limit.remaining:
                what = f"tokens per min (TPM): Limit {limit.limit}, Used {limit.limit - limit.remaining}"
                wait = limit.seconds_until(found[limit])
                raise self._refusal("tokens", TokenLimit, f"{what}, Requested {found[limit]}", wait)
        for limited, amount in found.items():
            limited.reserve(amount)
        return found

    def _too_large(self, limit: str, tokens: int, param: str | None, *, reason: str) -> InvalidRequest:
        self._refusals[f"{reason}:{self.name}"] += 1
        what, how = "prompt is", "Shorten it."
        if param is not None:
            what, how = "prompt and its longest possible answers are", f"Shorten the prompt or lower '{param}'."
        message = f"Request too large: its {what} {tokens} tokens, and this API key is limited to {limit}. {how}"
        return InvalidRequest(message, param=param or "prompt", code=_CODE)

    def _beyond_budget(self, tokens: int, budget: PerMonth) -> RequestError:
        what = f"tokens per month: Limit {budget.limit}, Used {budget.used}, Requested {tokens}"
        if budget.used + tokens <= budget.limit:  # running requests may release enough
            what = f"{what}, held by running requests {budget.limit - budget.used - budget.remaining}"
            return self._refusal("budget", TokenLimit, what, _SOON_SECONDS)
        self._refusals[f"budget:{self.name}"] += 1
        begins, wait = budget.months.next_month
        message = f"You exceeded your current quota on {what}. It resets at {begins}."
        return QuotaUsedUp(message, code=_QUOTA_CODE, retry_after_seconds=_whole(wait))


class AdmittedRequest:
    """Running request of a key, with the tokens that it has reserved."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._reserved: dict[PerMinute | PerMonth, int] = {}  # tokens

    def reserve(self, prompts: int, answers: int, *, param: str) -> None:
        """Reserve tokens until the request ends; arguments and errors as in `Tenant.reserve`."""
        self._reserved = self._tenant.reserve(prompts, answers, param=param)

    def use(self, tokens: int) -> None:
        """Charge tokens to the reservation; tokens beyond it become a debt of the limit."""
        for limit, left in self._reserved.items():
            covered = min(tokens, left)
            self._reserved[limit] -= covered
            limit.use(tokens, reserved=covered)

    def release(self) -> None:
        """Release the unused reservation; may be called repeatedly."""
        for limit, left in self._reserved.items():
            limit.release(left)
            self._reserved[limit] = 0

    def end(self) -> None:
        """Release the reservation and count the end of the request."""
        self.release()
        self._tenant.num_running -= 1


class Tenants:
    """All API keys of this server."""

    def __init__(self, keys: Sequence[ApiKey], folder: Path, *, clock: Clock = time.monotonic) -> None:
        """`folder`: holds the file of used budgets. Raises StartupError if the file cannot be used."""
        self._use = MonthlyUse(folder) if any(key.budget_tokens is not None for key in keys) else None
        self.refusals: Counter[str] = Counter()  # refused requests by `reason:name of the key`
        self._all = [Tenant(key, self._use, self.refusals, clock=clock) for key in keys]

    def __bool__(self) -> bool:
        """Whether clients need a key."""
        return bool(self._all)

    def find(self, digest: bytes) -> Tenant | None:
        """Return the tenant whose key has this digest, or None. All keys are compared, so that the time taken does not
        reveal a near match."""
        found = [tenant for tenant in self._all if hmac.compare_digest(digest, tenant.digest)]
        return found[0] if found else None

    def kept(self) -> AbstractAsyncContextManager[None]:
        """Write used budgets to their file while the block runs, and at its end."""
        return nullcontext() if self._use is None else self._use.kept()


def _whole(seconds: float) -> int:
    """Round up to whole seconds, at least 1, for the Retry-After header."""
    return max(1, math.ceil(seconds))
