"""Tokens used in the present month by those who have a budget, kept in a file through restarts.

The file is written every two seconds while tokens are used, and at the end: a process that is killed loses what was
used since it wrote last, and what its running answers were yet to use.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from service.errors import StartupError

logger = logging.getLogger(__name__)

BUDGETS_FILE = "budgets.json"
SAVE_SECONDS = 2.0


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    month: str
    used_tokens: dict[str, NonNegativeInt]


class MonthlyUse:
    """Counts by account, which begin anew with each calendar month (UTC). Belongs to the event loop."""

    def __init__(self, folder: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Raises StartupError when the counts of an earlier process cannot be read, or another one keeps them."""
        self._now = now
        self._file = folder / BUDGETS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self._file.with_suffix(".lock"))
            saved = _read(self._file)
        except OSError as error:
            raise StartupError(f"budgets cannot be kept in {folder}: {error}; change state_dir") from error
        self._month, self._used = (self._this_month(), {}) if saved is None else (saved.month, saved.used_tokens)
        self._changed = False
        self._told = False  # that it cannot be written

    def of(self, account: str) -> int:
        self._turn()
        return self._used.get(account, 0)

    def add(self, account: str, tokens: int) -> None:
        self._turn()
        self._used[account] = self._used.get(account, 0) + tokens
        self._changed = True

    @property
    def next_month(self) -> tuple[str, float]:
        """When it begins, in words, and the seconds until then."""
        now = self._now()
        begins = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
        return f"{begins:%Y-%m-%dT%H:%M:%SZ}", (begins - now).total_seconds()

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Written as long as this lasts, and at its end."""
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
        text = json.dumps({"month": self._month, "used_tokens": self._used})
        try:
            await asyncio.to_thread(_write, self._file, text)  # a slow disk must not hold the streams up
        except OSError as error:
            if not self._told:
                logger.error("budgets are counted but cannot be written to %s: %s", self._file, error)
            self._changed = self._told = True
        else:
            self._told = False

    def _turn(self) -> None:
        if (month := self._this_month()) != self._month:
            self._month, self._used, self._changed = month, {}, True

    def _this_month(self) -> str:
        return f"{self._now():%Y-%m}"


def _locked(path: Path) -> int:
    """A descriptor that holds the lock until it is closed, or the process ends however it does."""
    import fcntl  # Windows has none, and needs none without budgets

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        message = f"another server keeps its budgets in {path.parent}; give this one a state_dir of its own"
        raise StartupError(message) from None
    return descriptor


def _read(file: Path) -> _Saved | None:
    if not file.exists():
        return None
    try:
        return _Saved.model_validate_json(file.read_bytes())
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        message = f"the budgets in {file} cannot be read: {reason}; remove the file to begin this month with none used"
        raise StartupError(message) from error


def _write(file: Path, text: str) -> None:
    """Whole or not at all."""
    beside = file.with_suffix(".new")
    with beside.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    beside.replace(file)
