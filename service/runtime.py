"""The bridge between the event loop and the engine's thread: it submits requests and distributes their outputs. The
event loop never waits for a lock that the engine holds, and a consumer that stops reading delays no other."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import anyio
import anyio.to_thread

from adaptation.records import AdaptationStatus
from service.engine.requests import GenerationRequest, SequenceOutput
from service.errors import EngineFailure, NotFound, NotReady, QueueFull, RequestError, StartupError
from service.grammars import GrammarCompiler
from service.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "draining", "failed"]
Result = TypeVar("Result")

_LOOP_WATCH_SECONDS = 0.05  # between two measurements of the loop's delay
_DRAIN_POLL_SECONDS = 0.01
_LOADING_RETRY_SECONDS = 5
_TOKENIZER_THREADS = 2
_OPERATOR_THREADS = 4
_MAX_RETRY_SECONDS = 30
_NOT_LEARNING = (
    "This server does not learn while it serves: start it with --adaptation.enabled true and --drafter auto, or a "
    "drafter that has weights."
)


class EngineHandle(Protocol):
    """The engine as the bridge uses it; all methods may be called from any thread."""

    def start(self, deliver: Callable[[list[SequenceOutput]], None]) -> None:
        """Start the engine's thread, which calls `deliver` once per step."""

    def submit(self, request: GenerationRequest) -> None:
        """Add a request to the waiting queue."""

    def abort(self, request_id: str) -> None:
        """End a request within one step; no more of its outputs are delivered. Unknown ids are ignored."""

    def forget(self, scope: str | None = None) -> None:
        """Forget the past answers of a scope, or of all scopes, before the next step."""

    def wake(self) -> None:
        """Make an idle engine take one step, so that new weights need not wait for a request."""

    def drain(self) -> None:
        """Complete all running requests."""

    def stop(self) -> None:
        """End the thread and abort what still runs; harmless when repeated."""

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the thread, if one did."""

    @property
    def num_waiting(self) -> int:
        """Sequences in the waiting queue."""

    @property
    def num_running(self) -> int:
        """Sequences being generated."""


class AdaptationControl(Protocol):
    """Learning as the server uses it. Methods may be called from any thread, and may wait for an update under way."""

    def start(self, wake: Callable[[], None]) -> None:
        """Start learning; it calls `wake` when new weights wait for the engine."""

    def stop(self) -> None:
        """Stop learning and save its state."""

    def status(self) -> AdaptationStatus:
        """The present state."""

    def pause(self) -> None:
        """Stop learning until `resume`."""

    def resume(self) -> None:
        """Learn again after `pause`."""

    def rollback(self) -> int:
        """Serve the previous weights; returns the new version."""

    def load_from_disk(self, folder: Path) -> int:
        """Serve the drafter in a folder; returns the new version. Raises ValueError for an unusable drafter,
        AdaptationError if it cannot be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The public description of the served model."""

    name: str
    created: int  # seconds since the epoch
    max_model_len: int
    system_fingerprint: str
    drafter: str
    numerics: str
    vocab_size: int
    num_spec_tokens: int  # the longest path that a step can accept
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The loaded model with its engine."""

    engine: EngineHandle
    tokenizer: ChatTokenizer
    card: ModelCard
    adaptation: AdaptationControl | None = None
    seeds: tuple[tuple[int, ...], ...] = ()  # bootstrap prompts, to answer while the server is idle


class Meter(Protocol):
    """Counts the tokens that requests use of their reservation."""

    def use(self, tokens: int) -> None:
        """Use up a part of the reservation."""

    def release(self) -> None:
        """Give back the rest; harmless when repeated."""


class OutputStream:
    """The outputs of some requests, in the order in which the engine delivers them. Closing early (`with stream:`)
    aborts unfinished requests. The last output of each sequence has a `finish_reason`; an error of the engine is raised
    instead."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        *,
        abort: Callable[[str], None],
        release: Callable[[str], object],
        meter: Meter | None,
    ) -> None:
        self._unfinished = {request.request_id: request.n for request in requests}  # sequences, by request
        self._abort = abort
        self._release = release
        self._meter = meter
        self._queue: asyncio.Queue[SequenceOutput | RequestError] = asyncio.Queue()

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> SequenceOutput:
        if not any(self._unfinished.values()):
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, RequestError):
            raise item
        if item.finish_reason == "error":
            raise EngineFailure(item.error or "The engine could not finish this request.", code="engine_error")
        if item.finish_reason == "abort":
            raise _not_ready("The server aborted this request because it is shutting down.")
        self._unfinished[item.request_id] -= item.finish_reason is not None
        return item

    def __enter__(self) -> "OutputStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def put(self, item: SequenceOutput) -> None:
        """Count and queue an output."""
        if self._meter is not None:
            self._meter.use(len(item.token_ids))
        self._queue.put_nowait(item)

    def fail(self, error: RequestError) -> None:
        """End with an error and drop queued outputs, so that a slow reader receives the error too."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(error)

    def close(self) -> None:
        """Abort unfinished requests and release the reservation; harmless when repeated."""
        for request_id, num_unfinished in self._unfinished.items():
            self._release(request_id)
            if num_unfinished:
                self._abort(request_id)
        self._unfinished = {}
        if self._meter is not None:
            self._meter.release()


class Runtime:
    """Loads the model in the background, admits requests, distributes their outputs, drains and stops."""

    def __init__(self, load: Callable[[], ServedModel], *, max_waiting: int) -> None:
        self._load_served = load
        self._max_waiting = max_waiting
        self._served: ServedModel | None = None
        self.state: State = "loading"
        self._streams: dict[str, OutputStream] = {}
        self._max_lag_seconds = 0.0
        self.num_refused = 0  # requests refused because too many were waiting
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to load the model; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._limiter = anyio.CapacityLimiter(_TOKENIZER_THREADS)
        self._operators = anyio.CapacityLimiter(_OPERATOR_THREADS)
        self._loading = self._loop.create_task(self._load())
        self._tasks = [self._loading, self._loop.create_task(self._watch())]

    async def wait_until_loaded(self) -> None:
        """Wait until the model is loaded, or raise what prevented it."""
        await asyncio.shield(self._loading)

    @property
    def num_open(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._streams)

    @property
    def card(self) -> ModelCard:
        """The description of the loaded model. Raises RequestError before it is loaded."""
        return self._loaded().card

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer of the loaded model."""
        return self._loaded().tokenizer

    @property
    def seeds(self) -> tuple[tuple[int, ...], ...]:
        """The bootstrap prompts, as tokens."""
        return self._loaded().seeds

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of grammars for the loaded model."""
        return GrammarCompiler(self.tokenizer, self.card.vocab_size, self.card.eos_token_ids)

    def check_ready(self) -> None:
        """Raise NotReady or EngineFailure if new requests are not admitted."""
        if self.state == "loading":
            raise _not_ready("The model is still loading.")
        if self.state == "draining":
            raise _not_ready("The server is shutting down.")
        if self.state == "failed":
            raise EngineFailure("The engine has stopped; see the server's log.", code="engine_stopped")

    def generate(self, *requests: GenerationRequest, meter: Meter | None = None) -> OutputStream:
        """Submit requests and return their outputs. Call on the event loop; raises RequestError before anything runs.

        `meter` counts every output token, and is released when the stream is closed.
        """
        self.check_ready()
        engine = self._loaded().engine
        if (waiting := engine.num_waiting) >= self._max_waiting:
            self.num_refused += 1
            raise QueueFull(
                f"{waiting} requests are waiting already; try again later.",
                code="queue_full",
                retry_after_seconds=min(_MAX_RETRY_SECONDS, 1 + waiting // max(1, engine.num_running)),
            )
        stream = OutputStream(
            requests, abort=engine.abort, release=lambda name: self._streams.pop(name, None), meter=meter
        )
        try:
            for request in requests:
                assert request.request_id not in self._streams, "request ids must be unique"
                self._streams[request.request_id] = stream
                engine.submit(request)
        except BaseException:
            stream.close()
            raise
        return stream

    def forget(self, scope: str | None = None) -> None:
        """Forget the past answers of a scope, or of all scopes: no later request reads them."""
        self.check_ready()
        self._loaded().engine.forget(scope)

    async def off_loop(self, call: Callable[[], Result]) -> Result:
        """Run blocking work, such as tokenization, in a thread."""
        return await anyio.to_thread.run_sync(call, limiter=self._limiter)

    async def ask_adaptation(self, ask: Callable[[AdaptationControl], Result]) -> Result:
        """Call learning in a thread. Raises NotFound if it is off."""
        self.check_ready()
        control = self._loaded().adaptation
        if control is None:
            raise NotFound(_NOT_LEARNING, code="adaptation_off")
        try:
            # Separate threads: the call may wait for an update, and tokenization must not wait with it.
            return await anyio.to_thread.run_sync(ask, control, limiter=self._operators, abandon_on_cancel=True)
        except CancelledError as error:
            raise _not_ready("Learning is being stopped.") from error

    def max_loop_lag_seconds(self) -> float:
        """The longest delay of the event loop since the last call."""
        lag, self._max_lag_seconds = self._max_lag_seconds, 0.0
        return lag

    async def drain(self, timeout_seconds: float) -> None:
        """Refuse new requests, let the running ones end, then stop."""
        self.state = "draining"
        if self._served is not None:
            with anyio.move_on_after(timeout_seconds):
                await anyio.to_thread.run_sync(self._served.engine.drain, abandon_on_cancel=True)
                while self._streams:
                    await asyncio.sleep(_DRAIN_POLL_SECONDS)
        await self.stop()

    async def stop(self) -> None:
        """Stop at once; running requests end with an error."""
        self.state = "draining"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._served is not None:
            await anyio.to_thread.run_sync(_stop, self._served)
        self._fail_all(_not_ready("The server is shutting down."))

    def _loaded(self) -> ServedModel:
        if self._served is None:
            self.check_ready()
        assert self._served is not None, "ready without a model"
        return self._served

    async def _load(self) -> None:
        try:
            served = await anyio.to_thread.run_sync(self._load_served, abandon_on_cancel=True)
            if served.adaptation is not None:
                served.adaptation.start(served.engine.wake)
                served.engine.wake()  # weights learnt by an earlier process wait for a step
            served.engine.start(self._deliver)
        except Exception as error:
            if not isinstance(error, StartupError):  # whose message ends the process, without a traceback
                logger.exception("the model could not be loaded")
            self.state = "failed"
            raise
        self._served = served
        self.state = "ready"

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, outputs)  # one call per engine step for all requests

    def _dispatch(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            # A request may have been aborted while its outputs were on their way.
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)

    async def _watch(self) -> None:
        while True:
            due = self._loop.time() + _LOOP_WATCH_SECONDS
            await asyncio.sleep(_LOOP_WATCH_SECONDS)
            self._max_lag_seconds = max(self._max_lag_seconds, self._loop.time() - due)
            self._check_engine()

    def _check_engine(self) -> None:
        if self.state == "failed" or self._served is None or self._served.engine.failure is None:
            return
        self.state = "failed"
        self._fail_all(EngineFailure("The engine stopped on an internal error.", code="engine_stopped"))

    def _fail_all(self, error: RequestError) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)


def _stop(served: ServedModel) -> None:
    """Stop the engine before learning, which still observes the last queries."""
    served.engine.stop()
    if served.adaptation is not None:
        served.adaptation.stop()


def _not_ready(message: str) -> NotReady:
    return NotReady(message, code="not_ready", retry_after_seconds=_LOADING_RETRY_SECONDS)
