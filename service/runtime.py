"""The async bridge: requests go to the engine's thread, its outputs come back to whoever waits for them. The event loop
never waits for a lock that the engine holds, and a consumer that stops reading delays nobody."""

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
from service.errors import EngineFailure, NotFound, NotReady, QueueFull, RequestError
from service.grammars import GrammarCompiler
from service.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "draining", "failed"]
Result = TypeVar("Result")

_LOOP_WATCH_SECONDS = 0.005
_LOADING_RETRY_SECONDS = 5
_TOKENIZER_THREADS = 2
_OPERATOR_THREADS = 4
_LONGEST_RETRY_SECONDS = 30
_NOT_LEARNING = (
    "This server does not learn while it serves: start it with --adaptation.enabled true and --drafter auto, or a "
    "drafter that has weights."
)


class EngineHandle(Protocol):
    """What the bridge asks of an engine; everything may be called from any thread."""

    def start(self, deliver: Callable[[list[SequenceOutput]], None]) -> None: ...  # deliver: once per step, from there

    def submit(self, request: GenerationRequest) -> None: ...

    def abort(self, request_id: str) -> None:
        """Free what the request holds within one step; nothing more is delivered for it. Unknown ids are ignored."""

    def forget(self, scope: str | None = None) -> None:
        """Forget past answers of this scope, or of all, before the next step."""

    def wake(self) -> None: ...  # an idle engine steps once, so that new weights need not wait for a request

    def drain(self) -> None: ...  # finish what runs

    def stop(self) -> None: ...  # give up what still runs; harmless when repeated

    @property
    def failure(self) -> BaseException | None: ...  # why the thread ended by itself

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...


class AdaptationControl(Protocol):
    """What the server asks of learning. May be called from any thread, and may wait for an update under way."""

    def start(self, wake: Callable[[], None]) -> None: ...  # wake: called when weights wait for the engine

    def stop(self) -> None: ...  # and keep its state

    def status(self) -> AdaptationStatus: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def rollback(self) -> int: ...  # serve what was served before; -> the version of the drafter

    def load_from_disk(self, folder: Path) -> int:
        """-> its version. Raises ValueError naming what is wrong with it, AdaptationError when it cannot be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What clients may know of the model that is served."""

    name: str
    created: int  # seconds since the epoch
    max_model_len: int
    system_fingerprint: str
    drafter: str
    numerics: str
    vocab_size: int
    num_spec_tokens: int  # longest path that a step can accept
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Served:
    """What loading brings about."""

    engine: EngineHandle
    tokenizer: ChatTokenizer
    card: ModelCard
    adaptation: AdaptationControl | None = None
    seeds: tuple[tuple[int, ...], ...] = ()  # prompts to answer while nobody asks


class Meter(Protocol):
    """Counts what requests use of what was held for them."""

    def use(self, tokens: int) -> None: ...

    def let_go(self) -> None: ...  # of the rest; harmless when repeated


class Unmetered:
    """For requests that nobody counts."""

    def use(self, tokens: int) -> None:
        pass

    def let_go(self) -> None:
        pass


_UNMETERED = Unmetered()


class OutputStream:
    """The outputs of some requests, in the order in which the engine delivers them. Closing early (`with stream:`)
    aborts what is unfinished. The outputs of each sequence end with one that has a `finish_reason`; an error of the
    engine is raised instead."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        *,
        abort: Callable[[str], None],
        release: Callable[[str], object],
        meter: Meter,
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
            raise _not_ready("The server gave this request up because it is shutting down.")
        self._unfinished[item.request_id] -= item.finish_reason is not None
        return item

    def __enter__(self) -> "OutputStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def put(self, item: SequenceOutput) -> None:
        self._meter.use(len(item.token_ids))
        self._queue.put_nowait(item)

    def fail(self, error: RequestError) -> None:
        """End with this, before what has not been taken yet: whoever takes slowly shall hear of it, too."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(error)

    def close(self) -> None:
        """Take nothing more; harmless when repeated."""
        for request_id, num_unfinished in self._unfinished.items():
            self._release(request_id)
            if num_unfinished:
                self._abort(request_id)
        self._unfinished = {}
        self._meter.let_go()


class Runtime:
    """Loads in the background, admits requests, hands their outputs out, drains and stops."""

    def __init__(self, load: Callable[[], Served], *, max_waiting: int) -> None:
        self._load_served = load
        self._max_waiting = max_waiting
        self._served: Served | None = None
        self.state: State = "loading"
        self._streams: dict[str, OutputStream] = {}
        self._max_lag_seconds = 0.0
        self.num_refused = 0  # requests, because too many were waiting
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to load; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._limiter = anyio.CapacityLimiter(_TOKENIZER_THREADS)
        self._operators = anyio.CapacityLimiter(_OPERATOR_THREADS)
        self._loading = self._loop.create_task(self._load())
        self._tasks = [self._loading, self._loop.create_task(self._watch())]

    async def wait_until_loaded(self) -> None:
        """Return once the model is loaded, or raise what prevented it."""
        await asyncio.shield(self._loading)

    @property
    def num_open(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._streams)

    @property
    def card(self) -> ModelCard:
        return self._loaded().card

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self._loaded().tokenizer

    @property
    def seeds(self) -> tuple[tuple[int, ...], ...]:
        return self._loaded().seeds

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles what answers are to be."""
        return GrammarCompiler(self.tokenizer, self.card.vocab_size, self.card.eos_token_ids)

    def check_ready(self) -> None:
        """Raise what a new request would meet with."""
        if self.state == "loading":
            raise _not_ready("The model is still loading.")
        if self.state == "draining":
            raise _not_ready("The server is shutting down.")
        if self.state == "failed":
            raise EngineFailure("The engine has stopped; see the server's log.", code="engine_stopped")

    def generate(self, *requests: GenerationRequest, meter: Meter = _UNMETERED) -> OutputStream:
        """Submit requests and return their outputs. To be called on the event loop; raises before anything runs.

        The meter is told of every token that comes, and to let go of the rest when nothing more is taken.
        """
        self.check_ready()
        engine = self._loaded().engine
        if (waiting := engine.num_waiting) >= self._max_waiting:
            self.num_refused += 1
            raise QueueFull(
                f"{waiting} requests are waiting already; try again later.",
                code="queue_full",
                retry_after_seconds=min(_LONGEST_RETRY_SECONDS, 1 + waiting // max(1, engine.num_running)),
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
        """Forget past answers of this scope, or of all: no request that is submitted later reads them."""
        self.check_ready()
        self._loaded().engine.forget(scope)

    async def off_loop(self, call: Callable[[], Result]) -> Result:
        """Run blocking work, such as tokenization, beside the event loop."""
        return await anyio.to_thread.run_sync(call, limiter=self._limiter)

    async def ask_adaptation(self, ask: Callable[[AdaptationControl], Result]) -> Result:
        """Ask something of learning, beside the event loop; an answer nobody waits for any more is dropped."""
        self.check_ready()
        control = self._loaded().adaptation
        if control is None:
            raise NotFound(_NOT_LEARNING, code="adaptation_off")
        try:
            # Threads of their own: an answer may wait for an update, and tokenization must not wait with it.
            return await anyio.to_thread.run_sync(ask, control, limiter=self._operators, abandon_on_cancel=True)
        except CancelledError as error:
            raise _not_ready("Learning is being stopped.") from error

    def max_loop_lag_seconds(self) -> float:
        """How late the event loop was at worst since this was last asked."""
        lag, self._max_lag_seconds = self._max_lag_seconds, 0.0
        return lag

    async def drain(self, timeout_seconds: float) -> None:
        """Refuse new requests, let the running ones end, then stop."""
        self.state = "draining"
        if self._served is not None:
            with anyio.move_on_after(timeout_seconds):
                await anyio.to_thread.run_sync(self._served.engine.drain, abandon_on_cancel=True)
                while self._streams:
                    await asyncio.sleep(_LOOP_WATCH_SECONDS)
        await self.stop()

    async def stop(self) -> None:
        """Stop at once: what still runs is answered with an error."""
        self.state = "draining"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._served is not None:
            await anyio.to_thread.run_sync(_stop, self._served)
        self._give_up(_not_ready("The server is shutting down."))

    def _loaded(self) -> Served:
        if self._served is None:
            self.check_ready()
        assert self._served is not None, "ready without a model"
        return self._served

    async def _load(self) -> None:
        try:
            served = await anyio.to_thread.run_sync(self._load_served, abandon_on_cancel=True)
            if served.adaptation is not None:
                served.adaptation.start(served.engine.wake)
                served.engine.wake()  # what an earlier process has learnt waits for a step
            served.engine.start(self._deliver)
        except Exception:
            logger.exception("the model could not be loaded")
            self.state = "failed"
            raise
        self._served = served
        self.state = "ready"

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, outputs)  # one call per engine step serves all requests

    def _dispatch(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            # A request that was aborted while its outputs were on their way has no taker any more.
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)

    async def _watch(self) -> None:
        while True:
            due = self._loop.time() + _LOOP_WATCH_SECONDS
            await asyncio.sleep(_LOOP_WATCH_SECONDS)
            self._max_lag_seconds = max(self._max_lag_seconds, self._loop.time() - due)
            self._notice_engine_failure()

    def _notice_engine_failure(self) -> None:
        if self.state == "failed" or self._served is None or self._served.engine.failure is None:
            return
        self.state = "failed"
        self._give_up(EngineFailure("The engine stopped on an internal error.", code="engine_stopped"))

    def _give_up(self, error: RequestError) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)


def _stop(served: Served) -> None:
    """The engine first: its last queries are still observed."""
    served.engine.stop()
    if served.adaptation is not None:
        served.adaptation.stop()


def _not_ready(message: str) -> NotReady:
    return NotReady(message, code="not_ready", retry_after_seconds=_LOADING_RETRY_SECONDS)
