"""Thread pool and cache for grammars. Each account compiles one grammar at a time, each request has a time budget, and
scopes share no cache entries, so that compile times reveal nothing about other clients."""

import asyncio
import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from service.text.grammars import STACK_BYTES, GrammarBudgetError, GrammarCompiler, Result, Steps

_THREADS = 2  # one long compilation, which cannot be interrupted, leaves a thread to other accounts
_SLICE_SECONDS = 0.05
"""Time after which a task gives its thread back; a single compilation usually takes milliseconds."""
_REQUEST_SECONDS = 10.0
"""CPU time per request. It suffices for 128 functions that each have some unsupported keywords, at up to 80 ms each."""
PAUSE_SHARE = 3
"""Pause after a task, as a multiple of its CPU time, so that one account uses at most a quarter of a core."""
_MAX_CACHED = 256  # cached grammars
_MAX_CACHED_CHARACTERS = 2**20  # total source length; a compiled character takes about 100 bytes


class Source(NamedTuple):
    """Cache key of a compilation task, with the length of what is compiled."""

    digest: str
    size: int  # characters

    @staticmethod
    def of(value: object) -> "Source":
        """Hash the `repr` of a value."""
        written = repr(value)
        return Source(hashlib.blake2b(written.encode(), digest_size=16).hexdigest(), len(written))


class Turns:
    """One lock per account, which serialises the work of an account so that it occupies one thread at most."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, account: str) -> asyncio.Lock:
        """Return the lock to hold while working for an account."""
        return self._locks.setdefault(account, asyncio.Lock())


class GrammarPool:
    """Worker threads, one lock per account, and a cache of compiled grammars per scope. To be called on the event loop
    only."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        self._turns = Turns()
        self._cached: OrderedDict[tuple[str, str], tuple[Any, int]] = OrderedDict()  # (scope, digest): result, size

    async def result(
        self, account: str, scope: str, source: Source, steps: Callable[[GrammarCompiler], Steps[Result]]
    ) -> Result:
        """Return the cached result of a source, or compute it in steps on a worker thread. The time is charged to
        `account`; the result is shared within `scope`. Errors of the steps propagate; a cancelled call takes no further
        steps."""
        key = scope, source.digest
        if (found := self._find(key)) is None:
            async with self._turns.of(account):
                if (found := self._find(key)) is None:  # not computed while waiting for the lock
                    found = await self._taken(steps(self._compiler))
                    self._keep(key, source.size, found)
        result: Result = found
        return result

    def _find(self, key: tuple[str, str]) -> Any:
        found, _ = self._cached.get(key, (None, 0))
        if found is not None:
            self._cached.move_to_end(key)
        return found

    def _keep(self, key: tuple[str, str], size: int, compiled: object) -> None:
        """Cache a result. A full cache evicts the oldest entry of the scope that holds the most."""
        self._cached[key] = compiled, max(size, _MAX_CACHED_CHARACTERS // _MAX_CACHED)
        held = Counter[str]()
        for (owner, _), (_, each) in self._cached.items():
            held[owner] += each
        while held.total() > _MAX_CACHED_CHARACTERS:
            [(most, _)] = held.most_common(1)
            oldest = next(key for key in self._cached if key[0] == most)
            held[most] -= self._cached.pop(oldest)[1]

    async def _taken(self, steps: Steps[Result]) -> Result:
        """Run all steps. Beyond the time budget, raise GrammarBudgetError inside the steps."""
        left_seconds = _REQUEST_SECONDS
        with closing(steps):
            while left_seconds > 0:
                is_complete, seconds, result = await self._advance(steps)
                left_seconds -= seconds
                if is_complete:
                    taken: Result = result
                    return taken
                await asyncio.sleep(PAUSE_SHARE * seconds)
            error = GrammarBudgetError(
                f"the grammars of a request may take {_REQUEST_SECONDS:.0f} seconds, and these take more"
            )
            steps.throw(error)  # the steps add the name of the current field
            raise error

    async def _advance(self, steps: Steps[Result]) -> tuple[bool, float, Any]:
        """Run steps for one time slice. Returns whether they are complete, CPU seconds used, and the result."""
        before = threading.stack_size(STACK_BYTES)  # applies to a thread that the pool may start now
        try:
            slice_ = asyncio.get_running_loop().run_in_executor(self._threads, _advanced, steps)
        finally:
            threading.stack_size(before)
        try:
            return await asyncio.shield(slice_)
        except asyncio.CancelledError:
            await asyncio.wait([slice_])  # the lock must be held until the thread is free
            raise


def _advanced(steps: Steps[Result]) -> tuple[bool, float, Result | None]:
    began = time.thread_time()
    try:
        while (seconds := time.thread_time() - began) < _SLICE_SECONDS:
            next(steps)
    except StopIteration as end:
        return True, time.thread_time() - began, end.value
    return False, seconds, None
