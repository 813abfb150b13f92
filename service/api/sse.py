"""Send answers: whole, or as server-sent events with pings. Events are sent as steps produce them, or at a constant
rate and in one size, which hides what speculation did. A request ends when its client goes away.

Each stream is sent by its own task, so that a client that reads slowly delays only itself.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol, TypeVar

import pydantic_core
from pydantic import JsonValue
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from service.api.errors import internal_error
from service.api.schemas import LEAST_RELEASE_SECONDS, CompletionFields
from service.door import OutputStream
from service.engine.requests import GenerationRequest, SequenceOutput
from service.errors import InvalidRequest, RequestError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Chunk = Mapping[str, JsonValue]
Event = tuple[Chunk, str | None]
"""A chunk and its event id, or None without ids."""

PING = b": ping\n"
"""A comment without the empty line that ends an event, because OpenAI's client would read it as an empty event."""
PING_SECONDS = 15.0
DONE = b"data: [DONE]\n\n"
EVENT_BYTES = 1024
"""The size of a padded event is a multiple of this; an event of one token has exactly this size."""
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""What the OpenAPI document says of a route that may stream."""
_OBFUSCATION = "obfuscation"
"""OpenAI's name of the field that pads events."""


@dataclass(frozen=True, slots=True)
class Release:
    """Rate and padding at which one answer is sent to its client."""

    seconds: float | None = None  # time between two events; None: as steps produce them
    pads: bool = False  # pad events to one size

    def apply(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request, with one output per token if the release hides steps."""
        return request if self.seconds is None else replace(request, single_token_outputs=request.sampling.max_tokens)


def release_of(body: CompletionFields, *, choices: int, server_seconds: float | None) -> Release:
    """Combine the release settings of server and request: the slower rate applies. Raises InvalidRequest for fields
    that would reveal what it hides."""
    options = body.stream_options
    requested = None if options is None else options.release_seconds
    pads = None if options is None else options.include_obfuscation
    seconds = max((one for one in (requested, server_seconds) if one is not None), default=None)
    if seconds is None:
        return Release(pads=pads is True)
    if pads is False:
        message = "Tokens are sent at a constant rate, in events of one size: 'include_obfuscation' cannot be false."
        raise InvalidRequest(message, param="stream_options.include_obfuscation")
    for name in ("trace", "detailed"):
        if body.speculation is not None and getattr(body.speculation, name):
            message = f"Tokens are sent at a constant rate: 'speculation.{name}' would reveal what steps did."
            raise InvalidRequest(message, param=f"speculation.{name}")
    return Release(max(seconds / choices, LEAST_RELEASE_SECONDS), pads=True)


def _padding(size: int) -> str:
    """Return incompressible characters that fill an event of `size` bytes up to the padded size."""
    missing = -size % EVENT_BYTES
    return secrets.token_urlsafe(missing)[:missing]


def padded(lines: bytes) -> bytes:
    """Return an event, or no event, after a comment that pads it."""
    return b": %s\n" % _padding(len(b": \n" + lines)).encode() + lines


async def at_constant_rate(frames: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """Yield one frame per tick of `seconds`, or a comment of the same size if no frame is ready."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[bytes | None] = asyncio.Queue(1)
    reading = loop.create_task(_read(frames, ready))
    due = loop.time()
    try:
        while True:
            due = max(due + seconds, loop.time())  # ticks that a slow reader missed are not made up
            await asyncio.sleep(due - loop.time())
            frame = padded(b"") if ready.empty() else ready.get_nowait()
            if frame is None:
                return
            yield frame
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _read(frames: AsyncGenerator[bytes, None], ready: asyncio.Queue[bytes | None]) -> None:
    async with aclosing(frames):
        async for frame in frames:
            await ready.put(frame)
    await ready.put(None)


class StreamForm(Protocol):
    """Chunk format of one route."""

    def chunks(self, output: SequenceOutput) -> Iterator[Chunk]:
        """Return the chunks of one engine output."""

    def trailer(self) -> Iterator[Chunk]:
        """Return the chunks after the last output."""

    def failure(self, error: RequestError) -> Chunk:
        """Return the chunk that ends a failed stream."""

    def numbered(self, chunk: Chunk, number: int) -> Chunk:
        """Return the chunk with its sequence number, if the route reports one."""


class EventIds:
    """Assigns ids to the events of a stream, and drops events that the client has already received. This base class
    assigns no ids and drops nothing."""

    num_received = 0
    """Number of events that the client received before the stream was resumed."""

    def events(self, output: SequenceOutput, form: StreamForm) -> Iterator[Event]:
        """Return the new events of one engine output."""
        return ((chunk, None) for chunk in form.chunks(output))

    def at_end(self, trailer: Iterator[Chunk]) -> Iterator[Event]:
        """Return the new events after the last output."""
        return ((chunk, None) for chunk in trailer)


async def events(
    stream: OutputStream, form: StreamForm, ids: EventIds, *, done: bytes = DONE, pads: bool = False
) -> AsyncGenerator[bytes, None]:
    """Yield the frames of a stream. As the status line has been sent, an error becomes an event."""
    numbers = count(ids.num_received)

    def framed(chunk: Chunk, event_id: str | None = None) -> bytes:
        return frame(form.numbered(chunk, next(numbers)), event_id, pads=pads)

    try:
        async for output in stream:
            for event in ids.events(output, form):
                yield framed(*event)
        for event in ids.at_end(form.trailer()):
            yield framed(*event)
    except RequestError as error:
        yield framed(form.failure(error))
    except Exception:
        logger.exception("a stream ended with an unexpected exception")
        yield framed(form.failure(internal_error()))
    if done:
        yield padded(done) if pads else done


def frame(payload: Mapping[str, Any], event_id: str | None = None, *, pads: bool = False) -> bytes:
    """Encode an event; its `type`, if any, is also the name of the event."""
    name = payload.get("type")
    head = (b"" if name is None else b"event: %s\n" % name.encode()) + (
        b"" if event_id is None else b"id: %s\n" % event_id.encode()
    )
    if pads:
        bare = len(head + b"data: " + _json({**payload, _OBFUSCATION: ""}) + b"\n\n")
        payload = {**payload, _OBFUSCATION: _padding(bare)}
    return head + b"data: " + _json(payload) + b"\n\n"


def _json(payload: Mapping[str, Any]) -> bytes:
    # JSON has no infinity, and an operator must see that a value diverged.
    return pydantic_core.to_json(payload, inf_nan_mode="strings")


class EventStream(StreamingResponse):
    """Response that sends frames as they become ready, and a ping after `ping_seconds` without one. Always exits the
    context `outputs`. `seconds`: time between two frames (`Release`)."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        outputs: AbstractContextManager[object],
        *,
        seconds: float | None = None,
        ping_seconds: float = PING_SECONDS,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        every = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(frames, media_type="text/event-stream", headers={**every, **(headers or {})})
        self._frames = frames if seconds is None else at_constant_rate(frames, seconds)
        self._outputs = outputs
        self._ping_seconds = ping_seconds
        self._sending = asyncio.Lock()
        self._last_sent_seconds = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._outputs, suppress(ClientDisconnect, OSError):
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
    """Collect all outputs of a stream. It is always closed, and at once if the client goes away."""
    with stream:
        return await unless_client_gone(request.receive, _all(stream, release))


async def _all(stream: OutputStream, release: Release) -> list[SequenceOutput]:
    loop = asyncio.get_running_loop()
    began, outputs = loop.time(), [output async for output in stream]
    if release.seconds is not None:  # answer when the last token would have been streamed
        num_tokens = sum(len(output.token_ids) for output in outputs)
        await asyncio.sleep(began + release.seconds * num_tokens - loop.time())
    return outputs


def json_response(payload: Chunk, status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    """Build a JSON response."""
    return Response(_json(payload), status, headers, media_type="application/json")


async def unless_client_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, or cancel it and raise ClientDisconnect when the client closes its connection."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
