"""Thread pool and cache for grammars. Each account compiles one grammar at a time, each request has a time budget, and
scopes share no cache entries, so that compile times reveal nothing about other clients."""

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
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


Turns = WeakValueDictionary[str, asyncio.Lock]
"""One lock per account, which serialises the work of an account so that it occupies one thread at most."""


class GrammarPool:
    """Worker threads, one lock per account, and a cache of compiled grammars per scope. To be called on the event loop
    only."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        self._turns = Turns()
        self._cached: OrderedDict[tuple[str, str], Any] = OrderedDict()  # (scope, source): result

    async def result(
        self, account: str, scope: str, source: str, steps: Callable[[GrammarCompiler], Steps[Result]]
    ) -> Result:
        """Return the cached result of a source, or compute it in steps on a worker thread. The time is charged to
        `account`; the result is shared within `scope`. Errors of the steps propagate; a cancelled call takes no further
        steps. `source`: text that is the same for the same steps only."""
        key = scope, source
        if (found := self._find(key)) is None:
            async with self._turns.setdefault(account, asyncio.Lock()):
                if (found := self._find(key)) is None:  # not computed while waiting for the lock
                    found = await self._taken(steps(self._compiler))
                    self._keep(key, found)
        result: Result = found
        return result

    def _find(self, key: tuple[str, str]) -> Any:
        if key in self._cached:
            self._cached.move_to_end(key)
        return self._cached.get(key)

    def _keep(self, key: tuple[str, str], compiled: object) -> None:
        """Cache a result. A full cache evicts the oldest entry of the scope that holds the most."""
        self._cached[key] = compiled
        held = Counter[str]()
        for kept in self._cached:
            held[kept[0]] += _size(kept)
        while held.total() > _MAX_CACHED_CHARACTERS:
            [(most, _)] = held.most_common(1)
            oldest = next(kept for kept in self._cached if kept[0] == most)
            del self._cached[oldest]
            held[most] -= _size(oldest)

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


def _size(key: tuple[str, str]) -> int:
    """Characters that a cached result counts as."""
    return max(len(key[1]), _MAX_CACHED_CHARACTERS // _MAX_CACHED)


def _advanced(steps: Steps[Result]) -> tuple[bool, float, Result | None]:
    began = time.thread_time()
    try:
        while (seconds := time.thread_time() - began) < _SLICE_SECONDS:
            next(steps)
    except StopIteration as end:
        return True, time.thread_time() - began, end.value
    return False, seconds, None
