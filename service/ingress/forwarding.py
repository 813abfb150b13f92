"""Forwards one request to replicas; if a replica fails during a stream, another one resumes it.

Only the id of the last forwarded event is kept, and the tokens from the ids of all events. With these, another replica
continues after that event and verifies the tokens before it (`service/api/resumption.py`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from pydantic import JsonValue

from service.api.errors import error_body, error_event, error_response
from service.api.sse import DONE, frame
from service.errors import EngineFailure, NotReady, RequestError, parsed_json
from service.ingress.replicas import Broken, ForwardedRequest, Headers, ReplicaAnswer, Replicas, Unreachable, passed_on

logger = logging.getLogger(__name__)

STALL_SECONDS = 30.0
PATIENCE_SECONDS = 30.0
GOES_ON = b": goes on elsewhere\n"
"""SSE comment sent when another replica takes over a stream; clients ignore it, benchmarks count it."""
_RETRY_SECONDS = 0.2
_MAX_BREAKS = 3
_TEMPORARY = frozenset({"not_ready", "too_many_connections"})
_FULL = "queue_full"
_STOPPED = "engine_stopped"
# A replica's error codes for requests that another replica may still answer.
_NOT_FOUND = frozenset({"response_not_found", "previous_response_not_found", "item_not_found"})
_REFUSALS = _TEMPORARY | _NOT_FOUND | {_FULL, "other_system_fingerprint"}
_RETRY_AFTER_SECONDS = 5
_FRAME_END = b"\n\n"
_MAX_TOKEN_BYTES = 32 * 1024  # half of a server's limit for headers; tokens beyond it are generated again
_RESPONSES = "/v1/responses"


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A complete HTTP answer, held in memory."""

    status: int
    headers: Headers
    body: bytes

    @staticmethod
    def of(error: RequestError) -> "WholeAnswer":
        """Build the answer that reports an error to the client."""
        response = error_response(error)
        return WholeAnswer(response.status_code, passed_on(response.raw_headers), bytes(response.body))

    @property
    def code(self) -> str | None:
        """OpenAI error code of the answer; None if it is no error or has no code."""
        return None if self.status < 400 else _code_in(self.body)


class Forwarding:
    """Sends one request to replicas until one answers, and resumes its stream on others. The owner calls `close`."""

    def __init__(
        self, replicas: Replicas, request: ForwardedRequest, *, stall_seconds: float, patience_seconds: float
    ) -> None:
        """`stall_seconds`: silence of a stream after which its replica counts as lost; `patience_seconds`: how long to
        retry while no replica takes the request."""
        self._replicas = replicas
        self._request = request
        self._stall_seconds = stall_seconds
        self._patience_seconds = patience_seconds
        self._answer: ReplicaAnswer | None = None
        self._latest: set[str] = set()  # the replica tried last
        self._lost: set[str] = set()  # replicas that failed on this request, tried again only if there is no other
        self._breaks = 0  # failures since the last event that had an id
        self._num_events = 0  # events forwarded to the client
        self._last_id: bytes | None = None  # id of the last forwarded event that had one, without tokens
        self._tokens = b""  # the answer's tokens, encoded as in event ids

    async def close(self) -> None:
        """Close the replica's answer that is being read, if any."""
        if self._answer is not None:
            answer, self._answer = self._answer, None
            await answer.close()

    async def begin(self) -> ReplicaAnswer | WholeAnswer:
        """Send the request; returns a complete answer, which may report an error, or a stream that `frames` reads."""
        while True:
            try:
                found = await self._send(self._request, waits_for=_TEMPORARY)
                if isinstance(found, WholeAnswer) or found.is_stream:
                    return found
                return await self._read(found)
            except Broken as error:
                self._note(f"{self._request.method} {self._request.path}", error)
                if self._breaks >= _MAX_BREAKS:
                    return WholeAnswer.of(_gave_up(self._breaks))

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream that `begin` returned, resuming it on other replicas. If that fails, the last
        event reports the error."""
        while True:
            try:
                async with aclosing(self._events()) as events:
                    async for one in events:
                        yield one
                return
            except Broken as error:
                self._note(f"a stream after {self._num_events} events", error)
            broke, failure = time.monotonic(), await self._resume()
            if failure is not None:
                yield self._failure(failure)
                if not self._request.path.startswith(_RESPONSES):
                    yield DONE
                return
            logger.info("another replica resumed a stream after %.3f s", time.monotonic() - broke)
            yield GOES_ON

    def _note(self, what: str, error: Broken) -> None:
        logger.warning("%s: %s", what, error)
        self._breaks += 1
        self._lost |= self._latest

    async def _resume(self) -> RequestError | None:
        """Resume the stream on another replica; returns None, or the error to report if no replica resumes it."""
        await self.close()
        if self._num_events and self._last_id is None:
            return EngineFailure("The replica failed, and this stream cannot be resumed.", code="replica_lost")
        request = self._request
        if self._last_id is not None:
            request = await asyncio.to_thread(request.resumed_after, self._last_id + self._tokens)
        while self._breaks < _MAX_BREAKS:
            try:
                found = await self._send(request, waits_for=_TEMPORARY | {_FULL})
            except Broken as error:
                self._note("resuming a stream", error)
                continue
            if isinstance(found, WholeAnswer):
                reason = _error_in(found.body).get("message", f"status {found.status}")
                return NotReady(f"The replica failed, and no other resumes the stream: {reason}", code="replica_lost")
            return None
        return _gave_up(self._breaks)

    async def _send(self, request: ForwardedRequest, waits_for: frozenset[str]) -> ReplicaAnswer | WholeAnswer:
        """Send the request until a replica takes it. Returns the first refusal if all replicas refuse with codes that
        are not in `waits_for`, or when the patience is over. Raises Broken."""
        deadline = time.monotonic() + self._patience_seconds
        while True:
            found = await self._try_replicas(request)
            if not isinstance(found, list):
                return found
            settled = bool(found) and all(one.code not in waits_for for one in found)
            if settled or time.monotonic() >= deadline:
                return found[0] if found else WholeAnswer.of(_no_replica())
            await asyncio.sleep(_RETRY_SECONDS)

    async def _try_replicas(self, request: ForwardedRequest) -> ReplicaAnswer | WholeAnswer | list[WholeAnswer]:
        """Try each replica once; returns the answer of the first one that does not refuse, or all refusals. Raises
        Broken."""
        refusals: list[WholeAnswer] = []
        tried = set(self._lost)
        while True:
            before = frozenset(tried)
            try:
                answer = await self._replicas.send(request, tried)
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
                raise Broken("the engine has stopped")  # perhaps because of this request
            if whole.code not in _REFUSALS:
                return whole
            refusals.append(whole)
        if tried == self._lost:
            self._lost = set()
        return refusals

    async def _read(self, answer: ReplicaAnswer) -> WholeAnswer:
        """Read an answer to its end and close it. Raises Broken."""
        try:
            return WholeAnswer(answer.status, answer.headers, b"".join([chunk async for chunk in answer.chunks]))
        finally:
            await self.close()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events and comments of the replica's stream. Raises Broken."""
        assert self._answer is not None, "a stream has begun"
        left, has_begun, loop = b"", False, asyncio.get_running_loop()
        patience = self._stall_seconds  # reduced by waiting for the replica, not for the client
        async with aclosing(self._answer.chunks) as chunks:
            while True:
                began = loop.time()
                try:
                    async with asyncio.timeout(patience):
                        chunk = await anext(chunks)
                except StopAsyncIteration:
                    break
                except TimeoutError:
                    raise Broken(f"nothing arrived for {self._stall_seconds:g} seconds") from None
                patience -= loop.time() - began
                complete, left = _split(left + chunk)
                for one in complete:
                    is_event = not one.startswith(b":")
                    if is_event:
                        self._pass(one)
                        has_begun = True
                    if is_event or not has_begun:  # after the first event, a ping is not a sign of progress
                        patience = self._stall_seconds
                    yield one
        if left:
            raise Broken("the answer ended within an event")

    def _pass(self, event: bytes) -> None:
        """Record an event before it is forwarded. Raises Broken if it reports that the replica cannot continue."""
        event_id = next((line[4:] for line in event.split(b"\n") if line.startswith(b"id: ")), None)
        if event_id is not None:
            self._last_id, mark, tokens = event_id.partition(b"~")
            self._breaks = 0
            if len(self._tokens) + len(tokens) < _MAX_TOKEN_BYTES:
                self._tokens += mark + tokens
        elif b'"error"' in event and (self._num_events == 0 or self._last_id is not None):
            code = _code_in(event.partition(b"data: ")[2])
            if code in _TEMPORARY or code == _STOPPED:
                raise Broken(f"the replica reports {code}")
        self._num_events += 1

    def _failure(self, error: RequestError) -> bytes:
        if self._request.path.startswith(_RESPONSES):
            return frame({**error_event(error), "sequence_number": self._num_events})
        return frame(error_body(error))


def _split(received: bytes) -> tuple[list[bytes], bytes]:
    """Split received bytes into complete events and comments, and an incomplete rest."""
    complete: list[bytes] = []
    while True:
        received = received.lstrip(b"\n")
        end = b"\n" if received.startswith(b":") else _FRAME_END
        one, found, rest = received.partition(end)
        if not found:
            return complete, received
        complete.append(one + end)
        received = rest


def _no_replica() -> NotReady:
    return NotReady("No replica could be reached.", code="no_replica", retry_after_seconds=_RETRY_AFTER_SECONDS)


def _gave_up(breaks: int) -> EngineFailure:
    return EngineFailure(f"{breaks} replicas in a row failed on this request.", code="replica_lost")


def _error_in(body: bytes) -> dict[str, JsonValue]:
    """Parse the OpenAI error object in a body or an event; empty if there is none."""
    try:
        parsed = parsed_json(body)
    except RequestError:
        return {}
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else {}
    return error if isinstance(error, dict) else {}


def _code_in(body: bytes) -> str | None:
    code = _error_in(body).get("code")
    return code if isinstance(code, str) else None
