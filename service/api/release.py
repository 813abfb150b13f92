"""How an answer leaves: as steps bring it, or at a constant rate in events of one size, which tell nobody on the way
what speculation did."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace

from service.api.schemas import LEAST_RELEASE_SECONDS, SamplingFields
from service.engine.requests import GenerationRequest
from service.errors import InvalidRequest

EVENT_BYTES = 1024
"""What the size of a padded event is a multiple of; an event of one token has that many."""
OBFUSCATION = "obfuscation"
"""OpenAI's name of the field that fills events up."""


@dataclass(frozen=True, slots=True)
class Release:
    """Of one answer."""

    seconds: float | None = None  # between two events; None: as they come
    pads: bool = False  # events to one size

    def cut(self, request: GenerationRequest) -> GenerationRequest:
        """The request with as many outputs as tokens, where steps are not to be seen."""
        return request if self.seconds is None else replace(request, single_token_outputs=request.sampling.max_tokens)


AS_IT_COMES = Release()


def release_of(body: SamplingFields, *, choices: int, server_seconds: float | None) -> Release:
    """The server's, or a request's own, whichever is slower. Raises InvalidRequest for what cannot be beside it."""
    options = body.stream_options
    asked = None if options is None else options.release_seconds
    pads = None if options is None else options.include_obfuscation
    seconds = max((one for one in (asked, server_seconds) if one is not None), default=None)
    if seconds is None:
        return Release(pads=pads is True)
    if pads is False:
        message = "Tokens leave at a constant rate here, in events of one size: 'include_obfuscation' cannot be false."
        raise InvalidRequest(message, param="stream_options.include_obfuscation")
    for name in ("trace", "detailed"):
        if body.speculation is not None and getattr(body.speculation, name):
            message = f"Tokens leave at a constant rate: 'speculation.{name}' would tell what steps did."
            raise InvalidRequest(message, param=f"speculation.{name}")
    return Release(max(seconds / choices, LEAST_RELEASE_SECONDS), pads=True)


def filling(missing: int) -> str:
    """So many characters that do not compress."""
    return secrets.token_urlsafe(missing)[:missing]


def missing_bytes(size: int) -> int:
    """What an event of so many bytes lacks."""
    return -size % EVENT_BYTES


def padded(lines: bytes) -> bytes:
    """An event, or a comment alone, with a comment before it that fills it up."""
    empty = b": \n"
    return b": %s\n" % filling(missing_bytes(len(empty + lines))).encode() + lines


async def at_constant_rate(frames: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """One frame at each tick from now on, until the last one; where there is none yet, a comment of the same size."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[bytes | None] = asyncio.Queue(1)
    reading = loop.create_task(_read(frames, ready))
    due = loop.time()
    try:
        while True:
            due = max(due + seconds, loop.time())  # what a slow reader missed is not made up for
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


async def held_back(began: float, release: Release, token_counts: Iterable[int]) -> None:
    """Wait until the last token of an answer that is sent whole would have left; `began`: of the loop's time."""
    if release.seconds is not None:
        await asyncio.sleep(began + release.seconds * sum(token_counts) - asyncio.get_running_loop().time())
