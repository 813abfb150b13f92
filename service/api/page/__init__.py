"""Live page: `GET /` and the page's files, and the server-sent events that the page shows, `GET /adaptree/feed`.

The content security policy lets the page reach this server only. The files hold no secrets and need no key; the routes
that the page reads check keys themselves. The feed begins with the history of the last minutes and continues with one
sample per second. One clock serves all readers; each reader gets the newest sample when it is ready for one, so that a
slow reader skips samples and delays no other reader.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from importlib.resources import files
from typing import Final

import pydantic_core
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from service.api.sse import STREAMED, EventStream, frame
from service.errors import RequestError
from service.observability.live import Live
from service.runtime import Runtime

logger = logging.getLogger(__name__)

FEED_PATH: Final = "/adaptree/feed"
_TICK_SECONDS: Final = 1.0
_FOLDER: Final = "/adaptree/page/"
_START: Final = "index.html"
_MODULES: Final = ("app.js", "charts.js", "chat.js", "drawing.js", "learning.js", "server.js", "tree.js")
_FILES: Final = {_START: "text/html", "style.css": "text/css"} | dict.fromkeys(_MODULES, "text/javascript")

PAGE_PATHS: Final = frozenset({"/", *(_FOLDER + name for name in _FILES if name != _START)})

_HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_router(feed: "Feed") -> APIRouter:
    """Build the router of the page's files and of its feed."""
    paths = {"/" if name == _START else _FOLDER + name: name for name in _FILES}
    router = APIRouter(routes=[_route(path, name) for path, name in paths.items()])

    @router.get(FEED_PATH, response_class=Response, responses=STREAMED)
    async def follow() -> Response:
        return EventStream(feed.frames(), nullcontext())

    return router


def _route(path: str, name: str) -> Route:
    content = files(__package__).joinpath(name).read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": etag}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=f"{_FILES[name]}; charset=utf-8", headers=headers)

    return Route(path, send, methods=["GET"])


class Feed:
    """Publishes a sample of the live figures to all readers, once per tick."""

    def __init__(self, live: Live, runtime: Runtime, *, tick_seconds: float = _TICK_SECONDS) -> None:
        self._live = live
        self._runtime = runtime
        self._tick_seconds = tick_seconds
        self._changed = asyncio.Condition()
        self._number = 0
        self._frame = b""
        self._ends = False  # whether `_frame` is the last one
        self._num_readers = 0
        self._status_query: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the clock during the block."""
        clock = asyncio.create_task(self._run())
        try:
            yield
        finally:
            tasks = [clock] if self._status_query is None else [clock, self._status_query]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames for one reader: the history, then each new sample. Ends when the server drains, because
        draining waits for open connections."""
        seen, ends = self._number, False
        self._num_readers += 1
        try:
            yield b"event: past\n" + frame(pydantic_core.to_jsonable_python(self._live.past()))
            while not ends:
                async with self._changed:
                    while self._number <= seen:
                        await self._changed.wait()
                    seen, newest, ends = self._number, self._frame, self._ends
                yield newest
        finally:
            self._num_readers -= 1

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._tick_seconds)
            asks = self._num_readers or not self._live.is_quiet  # learning sleeps while nothing happens
            if asks and (self._status_query is None or self._status_query.done()):  # else it waits for an update
                self._status_query = asyncio.create_task(self._observe_learning())
            # No await in this block: a reader must not get the same sample in the history and again as a new frame.
            async with self._changed:
                moment = pydantic_core.to_jsonable_python(self._live.tick())
                state = self._runtime.state
                learns = self._runtime.card.learns if state == "ready" else None
                self._frame, self._ends = frame({"state": state, "learns": learns, **moment}), state == "draining"
                self._number += 1
                self._changed.notify_all()

    async def _observe_learning(self) -> None:
        try:
            self._live.observe_adaptation(await self._runtime.ask_adaptation(lambda control: control.status()))
        except RequestError:
            return  # learning is off, not started or stopped
        except Exception:
            logger.exception("could not read the status of learning for the live feed")
