"""The engine's thread: takes requests from a queue, steps while there is work, delivers each step's outputs.

Only records cross threads: requests and aborts in, outputs out. No other thread touches the engine.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import torch

from kernels.cpu.library import use_threads
from kernels.graph_runner import HIGH_PRIORITY
from service.engine.engine import Deliver, Engine, EngineOutput
from service.engine.requests import Submission
from service.engine.stats import LoadStats
from service.observability.guard import Guard, Part

logger = logging.getLogger(__name__)

Observe = Callable[[EngineOutput, LoadStats], None]
_Message = Callable[[Engine], None]
_Result = TypeVar("_Result")
_PATIENCE_SECONDS = 0.1


class EngineThread:
    """Runs an engine; every method may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        observers: Mapping[Part, Observe] = MappingProxyType({}),
        ended: Iterable[Callable[[], None]] = (),
        *,
        num_threads: int = 1,
    ) -> None:
        """`observers` see each step after its outputs have left, each guarded as this part; `ended` are called, from
        the thread, after it has been stopped or drained; `num_threads` compute for it."""
        self._engine = engine
        self._observers = observers
        self._ended = ended
        self._num_threads = num_threads
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None  # the exception that ended the thread
        self._stopping = False
        self._draining = False

    @property
    def guard(self) -> Guard:
        """Guard of the bookkeeping."""
        return self._engine.guard

    @property
    def num_running(self) -> int:
        """Number of scheduled sequences, those in prefill included; waiting ones are not."""
        return len(self._engine.scheduler.running)

    def start(self, deliver: Deliver) -> None:
        """Start the thread; `deliver` is called from it, once per step."""
        self._thread = threading.Thread(target=self._run, args=(deliver,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, body: Submission) -> None:
        """Queue the requests of a body."""
        self._inbox.put(lambda engine: engine.submit(body))

    def abort(self, *request_ids: str) -> None:
        """End these requests before the next step; nothing more is delivered for them."""

        def end(engine: Engine) -> None:
            self._report(replace(engine.abort(*request_ids), outputs=[]))

        self._inbox.put(end)

    def forget(self, scope: str | None = None) -> None:
        """Forget past answers of this scope, or of all, before the next step."""
        self._inbox.put(lambda engine: engine.drafter.forget(scope))

    def between_steps(self, call: Callable[[], _Result], unless: threading.Event) -> _Result:
        """Run `call` in the engine's thread before the next step, and return its result. Raises its exception, and
        CancelledError once `unless` is set, or the engine has failed; the call may have happened then."""
        future = Future[_Result]()

        def run(engine: Engine) -> None:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        while not unless.is_set() and self.failure is None:
            with suppress(TimeoutError):
                return future.result(_PATIENCE_SECONDS)
        raise CancelledError

    def wake(self) -> None:
        """Make an idle engine step once, so that new weights are written without a request."""
        self._inbox.put(None)

    def drain(self) -> None:
        """Finish all requests, then end the thread; submit nothing afterwards."""
        self._draining = True
        self._inbox.put(None)

    def stop(self) -> None:
        """End the thread after the step in progress; running requests are dropped. May be called again."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, deliver: Deliver) -> None:
        use_threads(self._num_threads)
        try:
            with serving(self._engine.target.device):
                self._loop(deliver)
            for ended in self._ended:
                ended()
        except BaseException as error:  # includes panics of native libraries
            logger.exception("the engine stopped")
            self.failure = error
            deliver([])

    def _loop(self, deliver: Deliver) -> None:
        while not self._stopping and not (self._draining and self._engine.idle and self._inbox.empty()):
            self._read_inbox(wait=self._engine.idle and not self._draining)
            output = EngineOutput([], [], None) if self._stopping else self._engine.step(deliver)
            if output.stats is not None or output.finished:
                self._report(output)

    def _report(self, output: EngineOutput) -> None:
        for part, observe in self._observers.items():
            self.guard.run(part, partial(observe, output, self._engine.load), lambda: None)

    def _read_inbox(self, *, wait: bool) -> None:
        """Apply all messages that have arrived; with `wait`, wait for the first."""
        try:
            message = self._inbox.get(block=wait)
            while True:
                if message is not None:
                    message(self._engine)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return


@contextmanager
def serving(device: torch.device) -> Iterator[None]:
    """Compute on a stream of higher priority than learning's, ordered after earlier work of the current stream and
    before its later work. Changes nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
    before = torch.cuda.current_stream(device)
    stream.wait_stream(before)
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)
