"""The bridge between the event loop and the engine's thread: it submits requests and distributes their outputs. The
event loop never waits for a lock that the engine holds, and a consumer that stops reading delays no other."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import anyio
import anyio.to_thread

from adaptation.records import AdaptationStatus
from service.door import Door, Meter, OutputStream, not_ready
from service.engine.requests import GenerationRequest, SequenceOutput, Submission
from service.errors import EngineFailure, NotFound, PeerLost, StartupError
from service.observability.guard import Guard
from service.text.grammar_pool import PAUSE_SHARE, GrammarPool, Turns
from service.text.grammars import GrammarCompiler
from service.text.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "draining", "failed"]
Result = TypeVar("Result")

_DRAIN_POLL_SECONDS = 0.01
_TOKENIZER_THREADS = 2
_OPERATOR_THREADS = 4
_NOT_LEARNING = (
    "To turn it on, start the server with --adaptation.enabled true and --drafter auto, or a drafter that has weights."
)


class EngineHandle(Protocol):
    """The engine as the bridge uses it; all methods may be called from any thread."""

    def start(self, deliver: Callable[[list[SequenceOutput]], None]) -> None:
        """Start the engine's thread, which calls `deliver` once per step, and with no outputs when it has failed."""

    def submit(self, body: Submission) -> None:
        """Add the requests of a body to the waiting queue."""

    def abort(self, *request_ids: str) -> None:
        """End these requests within one step; no more of their outputs are delivered. Unknown ids are ignored."""

    def forget(self, scope: str | None = None) -> None:
        """Forget the past answers of a scope, or of all scopes, before the next step."""

    def wake(self) -> None:
        """Make an idle engine take one step, so that new weights need not wait for a request."""

    def drain(self) -> None:
        """Complete all running requests."""

    def stop(self) -> None:
        """End the thread and abort what still runs; may be called repeatedly."""

    @property
    def failure(self) -> BaseException | None:
        """Exception that ended the thread, or None."""

    @property
    def guard(self) -> Guard:
        """Counter of exceptions in bookkeeping."""

    @property
    def num_running(self) -> int:
        """Number of sequences being generated."""


class AdaptationControl(Protocol):
    """Control of learning, as the server uses it. Methods may be called from any thread, and may wait for an update in
    progress."""

    def start(self, wake: Callable[[], None]) -> None:
        """Start learning; it calls `wake` when new weights wait for the engine."""

    def stop(self) -> None:
        """Stop learning and save its state."""

    def status(self) -> AdaptationStatus:
        """Return the status of learning."""

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
    learns: str = "off"  # whether it learns while it serves, and why
    reads_predictions: bool = True  # whether the drafter drafts from a client's `prediction`


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The loaded model with its engine."""

    engine: EngineHandle
    tokenizer: ChatTokenizer
    card: ModelCard
    adaptation: AdaptationControl | None = None
    seeds: tuple[tuple[int, ...], ...] = ()  # bootstrap prompts, to answer while the server is idle


class Runtime:
    """Loads the model in the background, admits requests, distributes their outputs, drains and stops."""

    def __init__(self, load: Callable[[], ServedModel], *, max_waiting: int) -> None:
        self._load_served = load
        self._door = Door(max_waiting)
        self._turns = Turns()  # turns of parsing and tokenization, by account
        self._served: ServedModel | None = None
        self.state: State = "loading"
        self._max_lag_seconds = 0.0
        self._loading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to load the model; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._limiter = anyio.CapacityLimiter(_TOKENIZER_THREADS)
        self._operators = anyio.CapacityLimiter(_OPERATOR_THREADS)
        self._loading = self._loop.create_task(self._load())

    async def wait_until_loaded(self) -> None:
        """Wait until the model is loaded. Raises the exception that prevented it."""
        assert self._loading is not None, "started"
        await asyncio.shield(self._loading)

    @property
    def num_open(self) -> int:
        """Bodies that were accepted and have not ended."""
        return len(self._door)

    @property
    def num_refused(self) -> int:
        """Bodies that were refused because the queue had no place for them."""
        return self._door.num_refused

    @property
    def card(self) -> ModelCard:
        """The description of the loaded model. Raises RequestError before it is loaded."""
        return self._loaded().card

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Tokenizer of the loaded model. Raises RequestError before it is loaded."""
        return self._loaded().tokenizer

    @property
    def seeds(self) -> tuple[tuple[int, ...], ...]:
        """The bootstrap prompts, as tokens."""
        return self._loaded().seeds

    @cached_property
    def grammars(self) -> GrammarPool:
        """Compiler of grammars for the loaded model, with its own threads."""
        compiler = GrammarCompiler(self.tokenizer, self.card.vocab_size, self.card.eos_token_ids)
        return GrammarPool(compiler)

    def check_ready(self) -> None:
        """Raise NotReady or EngineFailure if new requests are not admitted."""
        self._check_engine()
        if self.state == "loading":
            raise not_ready("The model is still loading.")
        if self.state == "draining":
            raise not_ready("The server is shutting down.")
        if self.state == "failed":
            raise EngineFailure("The engine has stopped; see the server's log.", code="engine_stopped")

    def generate(self, *requests: GenerationRequest, meter: Meter | None = None) -> OutputStream:
        """Submit requests and return their output stream. Call on the event loop. Raises RequestError before anything
        runs.

        `meter` counts every output token, and is released when the stream is closed.
        """
        self.check_ready()
        engine, body = self._loaded().engine, Submission(requests)
        places = self._door.places(body, self.card.max_model_len)
        self._door.check(requests[0].scope.account, places, engine.num_running)
        stream = OutputStream(body, places, abort=engine.abort, release=self._door.leave, meter=meter)
        self._door.enter(stream)
        engine.submit(body)
        return stream

    def check_room(self, account: str) -> None:
        """Raise RequestError if even the smallest request of this account would be refused now."""
        self.check_ready()
        self._door.check(account, 1, self._loaded().engine.num_running)

    def forget(self, scope: str | None = None) -> None:
        """Forget the past answers of a scope, or of all scopes: no later request reads them."""
        self.check_ready()
        self._loaded().engine.forget(scope)

    async def off_loop(self, call: Callable[[], Result]) -> Result:
        """Run blocking work in a thread."""
        return await anyio.to_thread.run_sync(call, limiter=self._limiter)

    async def in_turn(self, account: str, call: Callable[[], Result]) -> Result:
        """Run parsing or tokenization in a thread, one call of an account at a time and with a pause after each, so
        that an account uses at most a quarter of a core."""
        turn, seconds = self._turns.setdefault(account, asyncio.Lock()), 0.0
        await turn.acquire()
        try:
            result, seconds = await self.off_loop(partial(_timed, call))
            return result
        finally:
            self._loop.call_later(PAUSE_SHARE * seconds, turn.release)

    async def ask_adaptation(self, ask: Callable[[AdaptationControl], Result]) -> Result:
        """Call `ask` with the control of learning, in a thread, and return its result. Raises NotFound if learning is
        off."""
        self.check_ready()
        control = self._loaded().adaptation
        if control is None:
            raise NotFound(f"Learning is {self.card.learns}. {_NOT_LEARNING}", code="adaptation_off")
        try:
            # Separate threads: the call may wait for an update, and tokenization must not wait with it.
            return await anyio.to_thread.run_sync(ask, control, limiter=self._operators, abandon_on_cancel=True)
        except CancelledError as error:
            raise not_ready("Learning is being stopped.") from error

    def max_loop_lag_seconds(self) -> float:
        """Return the longest time that outputs waited for the event loop since the last call, or 0.0 without
        outputs."""
        lag, self._max_lag_seconds = self._max_lag_seconds, 0.0
        return lag

    async def drain(self, timeout_seconds: float) -> None:
        """Refuse new requests, let running requests end within `timeout_seconds`, then stop."""
        self.state = "draining"
        if self._served is not None:
            with anyio.move_on_after(timeout_seconds):
                await anyio.to_thread.run_sync(self._served.engine.drain, abandon_on_cancel=True)
                while self.num_open:
                    await asyncio.sleep(_DRAIN_POLL_SECONDS)
        await self.stop()

    async def stop(self) -> None:
        """Stop at once; running requests end with an error."""
        self.state = "draining"
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._served is not None:
            await anyio.to_thread.run_sync(_stop, self._served)
        self._door.fail_all(not_ready("The server is shutting down."))

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
            if not isinstance(error, StartupError):  # its message ends the process, without a traceback
                logger.exception("the model could not be loaded")
            self.state = "failed"
            raise
        self._served = served
        self.state = "ready"

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        # One call per engine step for all requests.
        self._loop.call_soon_threadsafe(self._dispatch, outputs, time.monotonic())

    def _dispatch(self, outputs: list[SequenceOutput], delivered_at: float) -> None:
        self._max_lag_seconds = max(self._max_lag_seconds, time.monotonic() - delivered_at)
        for output in outputs:
            # A request may have been aborted while its outputs were on their way.
            if (stream := self._door.find(output.request_id)) is not None:
                try:
                    stream.put(output)
                except Exception as error:  # tokens were not counted: the reservation remains as the charge
                    self._loaded().engine.guard.count("limits", error)
        self._check_engine()  # the last delivery of a thread that failed is empty

    @property
    def has_lost_peer(self) -> bool:
        """Whether the server can only be started again, because a process that shared the model is lost."""
        return self._served is not None and isinstance(self._served.engine.failure, PeerLost)

    def _check_engine(self) -> None:
        if self.state == "failed" or self._served is None or self._served.engine.failure is None:
            return
        self.state = "failed"
        self._door.fail_all(EngineFailure("The engine stopped on an internal error.", code="engine_stopped"))


def _timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """Call and measure the CPU time. Returns the result and the seconds."""
    began = time.thread_time()
    return call(), time.thread_time() - began


def _stop(served: ServedModel) -> None:
    """Stop the engine before learning, which still observes the last queries."""
    served.engine.stop()
    if served.adaptation is not None:
        served.adaptation.stop()
