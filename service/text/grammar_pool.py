"""Compiles the grammars of requests in threads of its own, and keeps them: each sender has one compilation at a time,
each request a budget, and no sender learns from the time it takes what others compile."""

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

_THREADS = 2  # so that one sender's longest compilation, which nothing interrupts, does not stop all others
_SLICE_SECONDS = 0.05
"""A compilation takes milliseconds: a slice has some of them, and lets others come soon."""
_REQUEST_SECONDS = 10.0
"""Of a core, for one request: 128 functions, each with some keywords to be found and left out, at up to 80 ms each."""
PAUSE_SHARE = 3
"""Of the time that work of one account took: it rests for so long before its next, so that it takes a quarter of a
core beside the engine."""
_MAX_CACHED = 256  # grammars
_MAX_CACHED_CHARACTERS = 2**20  # of their sources; compiled, a character takes about 100 bytes


class Source(NamedTuple):
    """Digest and length of what is compiled."""

    digest: str
    size: int  # characters

    @staticmethod
    def of(value: object) -> "Source":
        """The source of a value, by its `repr`."""
        written = repr(value)
        return Source(hashlib.blake2b(written.encode(), digest_size=16).hexdigest(), len(written))


class Turns:
    """A lock for each account: it has one thing done at a time, so that others wait for no more than one of its."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, account: str) -> asyncio.Lock:
        """Held while something is done for an account."""
        return self._locks.setdefault(account, asyncio.Lock())


class GrammarPool:
    """The threads, the turns of senders, and what was compiled, by scope. Used on the event loop only."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        self._turns = Turns()
        self._cached: OrderedDict[tuple[str, str], tuple[Any, int]] = OrderedDict()  # by scope and digest

    async def result(
        self, account: str, scope: str, source: Source, steps: Callable[[GrammarCompiler], Steps[Result]]
    ) -> Result:
        """Compile a source in steps, or find what this scope compiled of it. `account`: whose turn it takes; `scope`:
        who shares the result. Raises what the steps raise; a cancelled call takes no further steps."""
        key = scope, source.digest
        if (found := self._find(key)) is None:
            async with self._turns.of(account):
                if (found := self._find(key)) is None:  # made meanwhile
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
        """Keep what a scope compiled; where there is too much, the scope with the most loses its oldest."""
        self._cached[key] = compiled, max(size, _MAX_CACHED_CHARACTERS // _MAX_CACHED)
        held = Counter[str]()
        for (owner, _), (_, each) in self._cached.items():
            held[owner] += each
        while held.total() > _MAX_CACHED_CHARACTERS:
            [(most, _)] = held.most_common(1)
            oldest = next(key for key in self._cached if key[0] == most)
            held[most] -= self._cached.pop(oldest)[1]

    async def _taken(self, steps: Steps[Result]) -> Result:
        """Take all steps within the budget of a request. Raises GrammarBudgetError, through the steps, beyond it."""
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
            steps.throw(error)  # they name the field
            raise error

    async def _advance(self, steps: Steps[Result]) -> tuple[bool, float, Any]:
        """Take steps for a slice of time. Returns whether they are complete, the seconds of a core, and the result."""
        before = threading.stack_size(STACK_BYTES)  # of a thread that the pool may start
        try:
            slice_ = asyncio.get_running_loop().run_in_executor(self._threads, _advanced, steps)
        finally:
            threading.stack_size(before)
        try:
            return await asyncio.shield(slice_)
        except asyncio.CancelledError:
            await asyncio.wait([slice_])  # until then the turn is not over
            raise


def _advanced(steps: Steps[Result]) -> tuple[bool, float, Result | None]:
    began = time.thread_time()
    try:
        while (seconds := time.thread_time() - began) < _SLICE_SECONDS:
            next(steps)
    except StopIteration as end:
        return True, time.thread_time() - began, end.value
    return False, seconds, None
