"""One request on its way through replicas: whoever takes it answers it, and another goes on where that one breaks off.

Nothing is kept of an answer but the id of the last event that was passed on, by which another replica leaves out what
came before, and what ids say of its tokens, which it then reads (`service/api/resumption.py`).
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from service.api.errors import error_body, error_event, error_response
from service.api.sse import DONE, frame
from service.errors import EngineFailure, NotReady, RequestError
from service.ingress.replicas import Answer, Asked, Broken, Headers, Replicas, Unreachable, passed_on

logger = logging.getLogger(__name__)

STALL_SECONDS = 30.0
PATIENCE_SECONDS = 30.0
GOES_ON = b": goes on elsewhere\n"
"""A comment, which clients pass over and measurements do not."""
_RETRY_SECONDS = 0.2
_MOST_BREAKS = 3
_PASSING = frozenset({"not_ready", "too_many_connections"})
_FULL = "queue_full"
_STOPPED = "engine_stopped"
# With these a replica says that it does not answer, and another one may.
_REFUSALS = _PASSING | {_FULL, "other_system_fingerprint", "response_not_found", "previous_response_not_found"}
_RETRY_AFTER_SECONDS = 5
_FRAME_END = b"\n\n"
_MOST_SAID = 32 * 1024  # bytes: half of what a server reads of headers; tokens beyond are generated again
_RESPONSES = "/v1/responses"


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that is complete."""

    status: int
    headers: Headers
    body: bytes

    @staticmethod
    def of(error: RequestError) -> "Whole":
        response = error_response(error)
        return Whole(response.status_code, passed_on(response.raw_headers), bytes(response.body))

    @property
    def code(self) -> str | None:
        """Of the error, if it is one."""
        return None if self.status < 400 else _code_in(self.body)


class Forwarding:
    """One request. Whoever has one closes it."""

    def __init__(self, replicas: Replicas, asked: Asked, *, stall_seconds: float, patience_seconds: float) -> None:
        """`stall_seconds`: how long a stream may be silent; `patience_seconds`: how long a replica is looked for."""
        self._replicas = replicas
        self._asked = asked
        self._stall_seconds = stall_seconds
        self._patience_seconds = patience_seconds
        self._answer: Answer | None = None
        self._latest: set[str] = set()  # who was asked last
        self._lost: set[str] = set()  # who broke off, and is asked again only if there is nobody else
        self._breaks = 0  # of them, one after the other without anything new
        self._num_events = 0  # that were passed on
        self._last_id: bytes | None = None  # of these
        self._said = b""  # what ids tell of their tokens

    async def close(self) -> None:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            await answer.close()

    async def begin(self) -> Answer | Whole:
        """The whole answer, or the beginning of a stream."""
        while True:
            try:
                found = await self._taken(self._asked, waits_for=_PASSING)
                if isinstance(found, Whole) or found.is_stream:
                    return found
                return await self._read(found)
            except Broken as error:
                self._note(f"{self._asked.method} {self._asked.path}", error)
                if self._breaks >= _MOST_BREAKS:
                    return Whole.of(_gave_up(self._breaks))

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The events of a stream that has begun, to its end."""
        while True:
            try:
                async with aclosing(self._told()) as told:
                    async for one in told:
                        yield one
                return
            except Broken as error:
                self._note(f"a stream behind {self._num_events} events", error)
            broke, failure = time.monotonic(), await self._go_on()
            if failure is not None:
                yield self._failure(failure)
                if not self._asked.path.startswith(_RESPONSES):
                    yield DONE
                return
            logger.info("a stream goes on after %.3f s elsewhere", time.monotonic() - broke)
            yield GOES_ON

    def _note(self, what: str, error: Broken) -> None:
        logger.warning("%s: %s", what, error)
        self._breaks += 1
        self._lost |= self._latest

    async def _go_on(self) -> RequestError | None:
        """Have another replica take up a stream. -> why none does"""
        await self.close()
        if self._num_events and self._last_id is None:
            return EngineFailure("The replica broke off, and this stream cannot be taken up.", code="replica_lost")
        asked = self._asked if self._last_id is None else self._asked.behind(self._last_id + self._said)
        while self._breaks < _MOST_BREAKS:
            try:
                found = await self._taken(asked, waits_for=_PASSING | {_FULL})
            except Broken as error:
                self._note("a stream that was to go on", error)
                continue
            if isinstance(found, Whole):
                return NotReady(
                    f"The replica broke off, and no other goes on: {_message_in(found)}", code="replica_lost"
                )
            return None
        return _gave_up(self._breaks)

    async def _taken(self, asked: Asked, waits_for: frozenset[str]) -> Answer | Whole:
        """What a replica answers, or the refusal of all of them. Raises Broken."""
        deadline = time.monotonic() + self._patience_seconds
        while True:
            found = await self._asked_in_turn(asked)
            if not isinstance(found, list):
                return found
            settled = bool(found) and all(one.code not in waits_for for one in found)
            if settled or time.monotonic() >= deadline:
                return found[0] if found else Whole.of(_nobody())
            await asyncio.sleep(_RETRY_SECONDS)

    async def _asked_in_turn(self, asked: Asked) -> Answer | Whole | list[Whole]:
        """What the first one answers that does not refuse, or all refusals. Raises Broken."""
        refusals: list[Whole] = []
        tried = set(self._lost)
        while True:
            before = frozenset(tried)
            try:
                answer = await self._replicas.ask(asked, tried)
            except Broken:
                self._latest = tried - before
                raise
            except Unreachable as error:
                logger.warning("%s", error)
                continue
            if answer is None:
                break
            self._latest, self._answer = tried - before, answer
            if answer.status < 400:
                return answer
            whole = await self._read(answer)
            if whole.code == _STOPPED:
                raise Broken("the engine has stopped")  # of this very request, perhaps
            if whole.code not in _REFUSALS:
                return whole
            refusals.append(whole)
        if tried == self._lost:
            self._lost = set()
        return refusals

    async def _read(self, answer: Answer) -> Whole:
        """Raises Broken."""
        try:
            return Whole(answer.status, answer.headers, b"".join([chunk async for chunk in answer.chunks]))
        finally:
            await self.close()

    async def _told(self) -> AsyncGenerator[bytes, None]:
        """What a replica tells of a stream, event by event. Raises Broken."""
        assert self._answer is not None, "a stream has begun"
        left, has_begun, loop = b"", False, asyncio.get_running_loop()
        patience = self._stall_seconds  # of which only waiting for the replica takes, not the client
        async with aclosing(self._answer.chunks) as chunks:
            while True:
                began = loop.time()
                try:
                    async with asyncio.timeout(patience):
                        chunk = await anext(chunks)
                except StopAsyncIteration:
                    break
                except TimeoutError:
                    raise Broken(f"nothing came for {self._stall_seconds:g} seconds") from None
                patience -= loop.time() - began
                complete, left = _parted(left + chunk)
                for one in complete:
                    is_event = not one.startswith(b":")
                    if is_event:
                        self._pass(one)
                        has_begun = True
                    if is_event or not has_begun:  # once events have come, a ping does not stand for one
                        patience = self._stall_seconds
                    yield one
        if left:
            raise Broken("the answer ended within an event")

    def _pass(self, event: bytes) -> None:
        """Take note of an event that is passed on. Raises Broken where it says that the replica gave up."""
        event_id = next((line[4:] for line in event.split(b"\n") if line.startswith(b"id: ")), None)
        if event_id is not None:
            self._last_id, mark, said = event_id.partition(b"~")
            self._breaks = 0
            if len(self._said) + len(said) < _MOST_SAID:
                self._said += mark + said
        elif b'"error"' in event and (self._num_events == 0 or self._last_id is not None):
            code = _code_in(event.partition(b"data: ")[2])
            if code in _PASSING or code == _STOPPED:
                raise Broken(f"the replica says {code}")
        self._num_events += 1

    def _failure(self, error: RequestError) -> bytes:
        if self._asked.path.startswith(_RESPONSES):
            return frame({**error_event(error), "sequence_number": self._num_events})
        return frame(error_body(error))


def _parted(received: bytes) -> tuple[list[bytes], bytes]:
    """Events and comments that are complete, and what is left."""
    complete: list[bytes] = []
    while True:
        received = received.lstrip(b"\n")
        end = b"\n" if received.startswith(b":") else _FRAME_END
        one, found, rest = received.partition(end)
        if not found:
            return complete, received
        complete.append(one + end)
        received = rest


def _nobody() -> NotReady:
    return NotReady("No replica answers.", code="no_replica", retry_after_seconds=_RETRY_AFTER_SECONDS)


def _gave_up(breaks: int) -> EngineFailure:
    return EngineFailure(f"{breaks} replicas one after the other broke off on this request.", code="replica_lost")


def _error_in(body: bytes) -> dict[str, Any]:
    """OpenAI's error, in an answer or in an event."""
    try:
        told = json.loads(body)
    except ValueError:
        return {}
    error = told.get("error", told) if isinstance(told, dict) else {}
    return error if isinstance(error, dict) else {}


def _code_in(body: bytes) -> str | None:
    code = _error_in(body).get("code")
    return code if isinstance(code, str) else None


def _message_in(refusal: Whole) -> str:
    return str(_error_in(refusal.body).get("message", f"status {refusal.status}"))
