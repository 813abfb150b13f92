"""API keys and their limits: which requests are admitted, what they reserve, and how a refusal is reported.

Everything here runs on the event loop and counts only what this process serves.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from service.api.limits import Clock, MonthlyUse, PerMinute, PerMonth, duration
from service.api_keys import ApiKey, digest_in, is_same
from service.errors import InvalidRequest, QuotaUsedUp, RequestError, RequestLimit, TokenLimit

_CODE, _QUOTA_CODE = "rate_limit_exceeded", "insufficient_quota"
_SOON_SECONDS = 1  # until running requests may have released their reservations


class Tenant:
    """One API key, its limits, and what it has used of them."""

    def __init__(self, key: ApiKey, use: MonthlyUse | None, *, clock: Clock) -> None:
        self.digest = digest_in(key.key)
        self.name = key.name or ""
        self.refused: Counter[str] = Counter()  # number of requests, by the limit
        requests, tokens, budget = key.requests_per_minute, key.tokens_per_minute, key.budget_tokens
        self._requests = None if requests is None else PerMinute(requests, clock=clock)
        self._tokens = None if tokens is None else PerMinute(tokens, clock=clock)
        self._budget = None if use is None or budget is None else PerMonth(budget, use, self._account)
        self.max_concurrent = key.max_concurrent
        self._num_running = 0

    @property
    def is_limited(self) -> bool:
        """Whether the key has any limit."""
        return any(limit is not None for limit in (self._requests, self._tokens, self._budget, self.max_concurrent))

    @property
    def _account(self) -> str:
        """The name under which the budget is stored: a hash of the hash, which no client can send as a key."""
        return self.name or "sha256:" + hashlib.sha256(self.digest).hexdigest()[:16]

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that report what is left of the limits per minute."""
        found: dict[str, str] = {}
        for name, limit in (("requests", self._requests), ("tokens", self._tokens)):
            if limit is not None:
                found[f"x-ratelimit-limit-{name}"] = str(limit.limit)
                found[f"x-ratelimit-remaining-{name}"] = str(limit.remaining)
                found[f"x-ratelimit-reset-{name}"] = duration(limit.reset_seconds)
        return found

    def admit(self) -> "AdmittedRequest":
        """Count a request of this key until its `end`. Raises RequestLimit."""
        if self.max_concurrent is not None and self._num_running >= self.max_concurrent:
            what = f"concurrent requests: Limit {self.max_concurrent}, Running {self._num_running}, Requested 1"
            raise self._refusal("concurrency", RequestLimit, what, _SOON_SECONDS)
        if (limit := self._requests) is not None:
            if limit.remaining < 1:
                what = f"requests per min (RPM): Limit {limit.limit}, Used {limit.limit - limit.remaining}, Requested 1"
                raise self._refusal("requests", RequestLimit, what, limit.seconds_until(1))
            limit.reserve(1)
            limit.use(1, reserved=1)
        self._num_running += 1
        return AdmittedRequest(self)

    def _refusal(self, reason: str, error: type[RequestError], what: str, wait_seconds: float) -> RequestError:
        """Count a refusal that ends by itself."""
        self.refused[reason] += 1
        wait = _whole(wait_seconds)
        message = f"Rate limit reached for this API key on {what}. Please try again in {duration(wait)}."
        return error(message, code=_CODE, retry_after_seconds=wait)

    def leave(self) -> None:
        """Count the end of a request."""
        self._num_running -= 1

    def reserve(self, prompts: int, answers: int, *, param: str) -> "dict[PerMinute | PerMonth, int]":
        """Reserve the most tokens that a request may use, but no more than one minute's worth of those per minute: long
        answers are seldom as long as they may be. Raises InvalidRequest for what can never fit, naming `param`, the
        field that bounds the answer's length, where that would help; TokenLimit or QuotaUsedUp if it does not fit now.
        # -> the reservation, by limit"""
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
        self.refused[reason] += 1
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
        self.refused["budget"] += 1
        begins, wait = budget.next_month
        message = f"You exceeded your current quota on {what}. It begins anew at {begins}."
        return QuotaUsedUp(message, code=_QUOTA_CODE, retry_after_seconds=_whole(wait))


class AdmittedRequest:
    """One request of a key, and the tokens that it has reserved until it ends."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._reserved: dict[PerMinute | PerMonth, int] = {}  # tokens

    def reserve(self, prompts: int, answers: int, *, param: str) -> None:
        """As `Tenant.reserve`."""
        self._reserved = self._tenant.reserve(prompts, answers, param=param)

    def use(self, tokens: int) -> None:
        """Use up a part of the reservation; beyond it, what the limit will have later."""
        for limit, left in self._reserved.items():
            covered = min(tokens, left)
            self._reserved[limit] -= covered
            limit.use(tokens, reserved=covered)

    def release(self) -> None:
        """Give back what is left of the reservation; harmless when repeated."""
        for limit, left in self._reserved.items():
            limit.release(left)
            self._reserved[limit] = 0

    def end(self) -> None:
        """Release the reservation and count the end of the request."""
        self.release()
        self._tenant.leave()


class Tenants:
    """All API keys of this server."""

    def __init__(self, keys: Sequence[ApiKey], folder: Path, *, clock: Clock = time.monotonic) -> None:
        """`folder`: holds the file of used budgets. Raises StartupError when it cannot be used."""
        self._use = MonthlyUse(folder) if any(key.budget_tokens is not None for key in keys) else None
        self._all = [Tenant(key, self._use, clock=clock) for key in keys]

    def __bool__(self) -> bool:
        """Whether clients need a key."""
        return bool(self._all)

    def find(self, digest: bytes) -> Tenant | None:
        """The key with this digest. All are compared, so that the time taken does not reveal a near match."""
        found = [tenant for tenant in self._all if is_same(digest, tenant.digest)]
        return found[0] if found else None

    def refusals(self) -> Mapping[str, int]:
        """Number of refused requests by `reason:name`."""
        found: Counter[str] = Counter()
        for tenant in self._all:
            found.update({f"{reason}:{tenant.name}": count for reason, count in tenant.refused.items()})
        return found

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Write used budgets to their file while the block runs, and at its end."""
        if self._use is None:
            yield
            return
        async with self._use.kept():
            yield


def _whole(seconds: float) -> int:
    """Whole seconds, as the Retry-After header takes them."""
    return max(1, math.ceil(seconds))
