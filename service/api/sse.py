"""Answers over time: server-sent events with pings, whole answers, and clients that go away in between.

One task sends, so a client that reads slowly delays only itself.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, suppress
from itertools import count
from typing import Any, Protocol, TypeVar

import pydantic_core
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from service.api.errors import ClientGoneError, internal_error
from service.api.release import (
    AS_IT_COMES,
    OBFUSCATION,
    Release,
    at_constant_rate,
    filling,
    held_back,
    missing_bytes,
    padded,
)
from service.engine.requests import SequenceOutput
from service.errors import RequestError
from service.runtime import OutputStream

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Chunk = Mapping[str, JsonValue]
Event = tuple[Chunk, str | None]
"""A chunk and its id, where it has one."""

PING = b": ping\n"
"""A comment alone, without the empty line that ends an event: to OpenAI's client that would be an empty event."""
PING_SECONDS = 15.0
DONE = b"data: [DONE]\n\n"


class StreamForm(Protocol):
    """How one route words its chunks."""

    def chunks(self, output: SequenceOutput) -> Iterator[Chunk]: ...

    def trailer(self) -> Iterator[Chunk]: ...

    def failure(self, error: RequestError) -> Chunk: ...

    def numbered(self, chunk: Chunk, number: int) -> Chunk:
        """An event with its number, where the route tells it."""


class Marks(Protocol):
    """Ids of a stream's events, and which of them its client has not got yet."""

    @property
    def num_taken(self) -> int:
        """Events that the client has from before."""

    def told(self, output: SequenceOutput, form: StreamForm) -> Iterator[Event]: ...

    def ends(self, trailer: Iterator[Chunk]) -> Iterator[Event]: ...


async def events(
    stream: OutputStream, form: StreamForm, marks: Marks, *, done: bytes = DONE, pads: bool = False
) -> AsyncGenerator[bytes, None]:
    """The frames of a whole stream. The status line is out, so an error becomes an event of its own."""
    numbers = count(marks.num_taken)

    def told(chunk: Chunk, event_id: str | None = None) -> bytes:
        return frame(form.numbered(chunk, next(numbers)), event_id, pads=pads)

    try:
        async for output in stream:
            for event in marks.told(output, form):
                yield told(*event)
        for event in marks.ends(form.trailer()):
            yield told(*event)
    except RequestError as error:
        yield told(form.failure(error))
    except Exception:
        logger.exception("a stream broke off")
        yield told(form.failure(internal_error()))
    if done:
        yield padded(done) if pads else done


def frame(payload: Mapping[str, Any], event_id: str | None = None, *, pads: bool = False) -> bytes:
    """An event, by its type where it has one."""
    name = payload.get("type")
    head = (b"" if name is None else b"event: %s\n" % name.encode()) + (
        b"" if event_id is None else b"id: %s\n" % event_id.encode()
    )
    if pads:
        bare = len(head + b"data: " + _json({**payload, OBFUSCATION: ""}) + b"\n\n")
        payload = {**payload, OBFUSCATION: filling(missing_bytes(bare))}
    return head + b"data: " + _json(payload) + b"\n\n"


def _json(payload: Mapping[str, Any]) -> bytes:
    # JSON knows no infinity, and a diverged value is what an operator must see.
    return pydantic_core.to_json(payload, inf_nan_mode="strings")


class EventStream(StreamingResponse):
    """Sends frames as they come and a ping when none came for a while; leaves `outputs` whatever happens."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        outputs: AbstractContextManager[object],
        *,
        release: Release = AS_IT_COMES,
        ping_seconds: float = PING_SECONDS,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        every = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(frames, media_type="text/event-stream", headers={**every, **(headers or {})})
        self._frames = frames if release.seconds is None else at_constant_rate(frames, release.seconds)
        self._outputs = outputs
        self._ping_seconds = ping_seconds
        self._sending = asyncio.Lock()
        self._last_sent_seconds = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._outputs, suppress(ClientGoneError, OSError):
            await unless_client_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pinging = asyncio.create_task(self._ping(send))
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await self._send_body(send, frame)
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_body(self, send: Send, frame: bytes) -> None:
        async with self._sending:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        self._last_sent_seconds = asyncio.get_running_loop().time()

    async def _ping(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._last_sent_seconds = loop.time()
        while True:
            await asyncio.sleep(self._last_sent_seconds + self._ping_seconds - loop.time())
            if loop.time() - self._last_sent_seconds >= self._ping_seconds:
                await self._send_body(send, PING)


async def collect(request: Request, stream: OutputStream, release: Release) -> list[SequenceOutput]:
    """All outputs of a stream; it is closed whatever happens, at once when the client goes away."""
    with stream:
        return await unless_client_gone(request.receive, _all(stream, release))


async def _all(stream: OutputStream, release: Release) -> list[SequenceOutput]:
    began = asyncio.get_running_loop().time()
    outputs = [output async for output in stream]
    await held_back(began, release, (len(output.token_ids) for output in outputs))
    return outputs


def whole(payload: Chunk, status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_json(payload), status, headers, media_type="application/json")


async def unless_client_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work, but give it up with `ClientGoneError` as soon as the client closes its connection."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
