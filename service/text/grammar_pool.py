"""Compiles the grammars of requests in threads of its own, and keeps them: each sender has one compilation at a time,
each request a budget, and no sender learns from the time it takes what others compile."""

import asyncio
import hashlib
import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from pydantic import JsonValue

from service.text.grammars import STACK_BYTES, GrammarCompiler, GrammarError, Result, Steps

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


class OffLoop(Protocol):
    """Calls a function in another thread, which does not wait for those of the pool."""

    async def __call__(self, call: Callable[[], Result]) -> Result: ...


class _Source(NamedTuple):
    """What is compiled, short."""

    digest: str
    size: int  # characters


class Turns:
    """A lock for each account: it has one thing done at a time, so that others wait for no more than one of its."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, account: str) -> asyncio.Lock:
        """Held while something is done for an account."""
        return self._locks.setdefault(account, asyncio.Lock())


class GrammarPool:
    """The threads, the turns of senders, and what was compiled, by scope. Used on the event loop only."""

    def __init__(self, compiler: GrammarCompiler, off_loop: OffLoop) -> None:
        self.compiler = compiler
        self.off_loop = off_loop
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        self.turns = Turns()  # of compiling
        self._cached: OrderedDict[tuple[str, str], tuple[Any, int]] = OrderedDict()  # by scope and digest

    def of_request(self, account: str, scope: str) -> "Compilations":
        """The compilations of one request. `account`: whose turn it takes; `scope`: who shares what is compiled."""
        return Compilations(self, account, scope)

    def find(self, scope: str, digest: str) -> Any:
        """What the scope compiled; None: nothing of this digest."""
        found, _ = self._cached.get((scope, digest), (None, 0))
        if found is not None:
            self._cached.move_to_end((scope, digest))
        return found

    def keep(self, scope: str, source: _Source, compiled: object) -> None:
        """Keep what a scope compiled; where there is too much, the scope with the most loses its oldest."""
        self._cached[scope, source.digest] = compiled, max(source.size, _MAX_CACHED_CHARACTERS // _MAX_CACHED)
        held = Counter[str]()
        for (owner, _), (_, size) in self._cached.items():
            held[owner] += size
        while held.total() > _MAX_CACHED_CHARACTERS:
            [(most, _)] = held.most_common(1)
            oldest = next(key for key in self._cached if key[0] == most)
            held[most] -= self._cached.pop(oldest)[1]

    async def advance(self, steps: Steps[Result]) -> tuple[bool, float, Any]:
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


class Compilations:
    """What one request compiles, within its budget. A request that is cancelled takes no further steps."""

    def __init__(self, pool: GrammarPool, account: str, scope: str) -> None:
        self.compiler = pool.compiler
        self.off_loop = pool.off_loop
        self._pool = pool
        self._account = account
        self._scope = scope
        self._left_seconds = _REQUEST_SECONDS

    async def result(self, named: str, source: JsonValue, steps: Callable[[], Steps[Result]]) -> Result:
        """Take the steps that make something of a source, or find what its scope made of it. `named`: what is made.
        Raises GrammarError, also where the budget is used up."""
        key = await self.off_loop(partial(_source, named, source))
        if (found := self._pool.find(self._scope, key.digest)) is None:
            async with self._pool.turns.of(self._account):
                if (found := self._pool.find(self._scope, key.digest)) is None:  # made meanwhile
                    found = await self._taken(steps())
                    self._pool.keep(self._scope, key, found)
        result: Result = found
        return result

    async def taken(self, steps: Steps[Result]) -> Result:
        """Take all steps, in the account's turn. Raises GrammarError where the budget is used up."""
        async with self._pool.turns.of(self._account):
            return await self._taken(steps)

    async def _taken(self, steps: Steps[Result]) -> Result:
        with closing(steps):
            while self._left_seconds > 0:
                is_complete, seconds, result = await self._pool.advance(steps)
                self._left_seconds -= seconds
                if is_complete:
                    taken: Result = result
                    return taken
                await asyncio.sleep(PAUSE_SHARE * seconds)
        raise GrammarError(f"the grammars of a request may take {_REQUEST_SECONDS:.0f} seconds, and these take more")


def _advanced(steps: Steps[Result]) -> tuple[bool, float, Result | None]:
    began = time.thread_time()
    try:
        while (seconds := time.thread_time() - began) < _SLICE_SECONDS:
            next(steps)
    except StopIteration as end:
        return True, time.thread_time() - began, end.value
    return False, seconds, None


def _source(named: str, source: JsonValue) -> _Source:
    written = f"{named} {json.dumps(source)}"
    return _Source(hashlib.blake2b(written.encode(), digest_size=16).hexdigest(), len(written))
