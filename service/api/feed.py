"""`GET /adaptree/feed`: the live state as server-sent events, the last minutes first and then one moment a second.

One clock serves all readers. Each takes the newest moment when it is ready for one, so that a slow reader misses some
and delays nobody.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import pydantic_core
from fastapi import APIRouter
from starlette.responses import Response

from service.api.sse import EventStream, frame
from service.errors import RequestError
from service.observability.live import Live
from service.runtime import Runtime

logger = logging.getLogger(__name__)

FEED_PATH = "/adaptree/feed"

_TICK_SECONDS = 1.0


class Feed:
    """The clock, the newest moment, and who waits for the next."""

    def __init__(self, live: Live, runtime: Runtime, *, tick_seconds: float = _TICK_SECONDS) -> None:
        self._live = live
        self._runtime = runtime
        self._tick_seconds = tick_seconds
        self._changed = asyncio.Condition()
        self._number = 0
        self._frame = b""
        self._ends = False  # with this frame
        self._asking: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The clock runs meanwhile."""
        clock = asyncio.create_task(self._run())
        try:
            yield
        finally:
            tasks = [clock] if self._asking is None else [clock, self._asking]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """What one reader is sent; it ends when the server is about to, which waits for open connections."""
        seen = self._number
        yield b"event: past\n" + frame(pydantic_core.to_jsonable_python(self._live.past()))
        ends = False
        while not ends:
            async with self._changed:
                while self._number <= seen:
                    await self._changed.wait()
                seen, newest, ends = self._number, self._frame, self._ends
            yield newest

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._tick_seconds)
            self._ask_learning()
            # Nothing is waited for in here, so that no reader finds a moment in the past and then gets it once more.
            async with self._changed:
                moment = pydantic_core.to_jsonable_python(self._live.tick())
                state = self._runtime.state
                self._frame, self._ends = frame({"state": state, **moment}), state == "draining"
                self._number += 1
                self._changed.notify_all()

    def _ask_learning(self) -> None:
        """Ask once more, unless the last question still waits for an update: questions must not pile up."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._observe_learning())

    async def _observe_learning(self) -> None:
        try:
            self._live.observe_adaptation(await self._runtime.ask_adaptation(lambda control: control.status()))
        except RequestError:
            return  # nobody learns here, or not yet, or no more
        except Exception:
            logger.exception("learning could not say how it is")


def feed_router(feed: Feed) -> APIRouter:
    router = APIRouter()

    @router.get(FEED_PATH)
    async def follow() -> Response:
        return EventStream(feed.frames(), nullcontext())

    return router
