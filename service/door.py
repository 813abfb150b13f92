"""Admission of request bodies to the waiting queue, and the output streams of admitted bodies. Used on the event loop
only."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from service.engine.requests import SequenceOutput, Submission
from service.errors import EngineFailure, InvalidRequest, NotReady, QueueFull, RequestError

_MAX_RETRY_SECONDS = 30
_TOKENS_PER_CHARACTER = 3  # a character of a compiled grammar takes 100 bytes of memory, a prompt token 36
_LOADING_RETRY_SECONDS = 5


class Meter(Protocol):
    """Charges generated tokens to a key's reservation."""

    def use(self, tokens: int) -> None:
        """Charge tokens."""

    def release(self) -> None:
        """Release the unused rest of the reservation; may be called repeatedly."""


class OutputStream(AsyncIterator[SequenceOutput], AbstractContextManager["OutputStream"]):
    """The outputs of a body's requests, in the order in which the engine delivers them. Closing early (`with stream:`)
    aborts unfinished requests. The last output of each sequence has a `finish_reason`; an error of the engine is raised
    instead."""

    def __init__(
        self,
        body: Submission,
        num_places: int,
        *,
        abort: Callable[..., None],
        release: Callable[["OutputStream"], None],
        meter: Meter | None,
    ) -> None:
        """`num_places`: places in the queue that the body holds while it waits."""
        self.account = body.requests[0].scope.account
        self._body, self._num_places = body, num_places
        self._unfinished = {request.request_id: request.n for request in body.requests}  # sequences per request
        self._abort = abort
        self._release = release
        self._meter = meter
        self._queue: asyncio.Queue[SequenceOutput | RequestError] = asyncio.Queue()

    async def __anext__(self) -> SequenceOutput:
        if not any(self._unfinished.values()):
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, RequestError):
            raise item
        if item.finish_reason == "error":
            raise EngineFailure(item.error or "The engine could not finish this request.", code="engine_error")
        if item.finish_reason == "abort":
            raise not_ready("The server aborted this request because it is shutting down.")
        self._unfinished[item.request_id] -= item.finish_reason is not None
        return item

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def request_ids(self) -> Iterable[str]:
        """Ids of the body's requests; empty once the stream is closed."""
        return self._unfinished.keys()

    @property
    def num_places(self) -> int:
        """Places in the queue that the body holds now."""
        return self._num_places if self._body.waits else 0

    def put(self, item: SequenceOutput) -> None:
        """Queue an output and count its tokens."""
        self._queue.put_nowait(item)
        if self._meter is not None:
            self._meter.use(len(item.token_ids))

    def fail(self, error: RequestError) -> None:
        """End with an error and drop queued outputs, so that a slow reader receives the error next."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(error)

    def close(self) -> None:
        """Abort unfinished requests and release the reservation; may be called repeatedly."""
        self._release(self)
        if unfinished := [request_id for request_id, count in self._unfinished.items() if count]:
            self._abort(*unfinished)
        self._unfinished = {}
        if self._meter is not None:
            self._meter.release()


class Door:
    """Admits bodies to the waiting queue by the places that their clients hold, and tracks the streams of open
    bodies."""

    def __init__(self, max_waiting: int) -> None:
        """`max_waiting`: number of places in the queue."""
        self.num_refused = 0  # bodies refused because the queue was full
        self._max_waiting = max_waiting
        self._streams: dict[str, OutputStream] = {}  # open streams by request id
        self._open: set[OutputStream] = set()

    def __len__(self) -> int:
        return len(self._open)

    def places(self, body: Submission, max_model_len: int) -> int:
        """Return the places that a body takes in the queue: the memory of its prompts and grammar in units of
        `max_model_len` tokens, rounded up. Raises InvalidRequest for more prompt tokens than a client can have
        waiting."""
        tokens, grammar = sum(len(request.prompt) for request in body.requests), body.requests[0].grammar
        most = self._max_waiting // 2 * max_model_len
        if tokens > most:
            message = f"Request too large: its prompts have {tokens} tokens, and a client may have {most} waiting."
            raise InvalidRequest(message, param="prompt", code="request_too_large")
        held = tokens + (0 if grammar is None else _TOKENS_PER_CHARACTER * grammar.num_characters)
        return min(-(-held // max_model_len), self._max_waiting // 2)

    def check(self, account: str, num_places: int, num_running: int) -> None:
        """Raise QueueFull if the client would hold more places than it leaves free. One client thus has at most half of
        the queue, and k clients that keep asking 1/(k + 1) each (dynamic thresholds: Choudhury and Hahne, 1998). A
        client that holds no place may take the last ones."""
        held = Counter[str]()
        for other in self._open:
            held[other.account] += other.num_places
        before, own = held[account], held[account] + num_places
        free = self._max_waiting - held.total() - num_places
        if free < 0 or (before and own > free):
            self.num_refused += 1
            raise QueueFull(
                f"Your requests would hold {own} of the queue's {self._max_waiting} places and leave {max(0, free)} to "
                "others; try again later.",
                code="queue_full",
                retry_after_seconds=min(_MAX_RETRY_SECONDS, 1 + held.total() // max(1, num_running)),
            )

    def enter(self, stream: OutputStream) -> None:
        """Register the stream of an admitted body."""
        self._open.add(stream)
        self._streams |= dict.fromkeys(stream.request_ids, stream)

    def find(self, request_id: str) -> OutputStream | None:
        """Return the open stream of a request, or None."""
        return self._streams.get(request_id)

    def leave(self, stream: OutputStream) -> None:
        """Unregister a stream."""
        self._open.discard(stream)
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)

    def fail_all(self, error: RequestError) -> None:
        """End every stream with this error."""
        for stream in self._open:
            stream.fail(error)


def not_ready(message: str) -> NotReady:
    """Build the error 503 of a server that is loading or shutting down."""
    return NotReady(message, code="not_ready", retry_after_seconds=_LOADING_RETRY_SECONDS)
