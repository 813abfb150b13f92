"""The engine's thread: takes requests from a queue, runs steps while there is work, and delivers their outputs.

Only messages cross threads: requests and aborts in, outputs out. No other thread accesses the engine's state.
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
_IDLE_SECONDS = 10.0  # after which an idle engine looks whether all processes that share the model answer


class EngineThread:
    """Runs an engine in a thread of its own; every method may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        observers: Mapping[Part, Observe] = MappingProxyType({}),
        ended: Iterable[Callable[[], None]] = (),
        *,
        num_threads: int = 1,
    ) -> None:
        """`observers`: called after each step's outputs were delivered, each guarded under the name of its part;
        `ended`: called from the thread after it was stopped or drained; `num_threads`: number of threads that the
        kernels of a CPU use."""
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
        """Guard under which the bookkeeping of steps runs."""
        return self._engine.guard

    @property
    def num_running(self) -> int:
        """Number of running sequences, including those in prefill, without waiting ones."""
        return len(self._engine.scheduler.running)

    def start(self, deliver: Deliver) -> None:
        """Start the thread; it calls `deliver` with the outputs of each step, and with an empty list if it fails."""
        self._thread = threading.Thread(target=self._run, args=(deliver,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, body: Submission) -> None:
        """Queue the requests of an HTTP request body."""
        self._inbox.put(lambda engine: engine.submit(body))

    def abort(self, *request_ids: str) -> None:
        """End these requests before the next step; no further output is delivered for them."""

        def end(engine: Engine) -> None:
            self._report(replace(engine.abort(*request_ids), outputs=[]))

        self._inbox.put(end)

    def forget(self, scope: str | None = None) -> None:
        """Forget the past answers of this scope, or of all scopes, before the next step."""
        self._inbox.put(lambda engine: engine.forget(scope))

    def between_steps(self, call: Callable[[], _Result], unless: threading.Event) -> _Result:
        """Run `call` in the engine's thread before the next step, and return its result. Raises the exceptions of
        `call`, and CancelledError if `unless` is set or the engine fails first; `call` may have run even then."""
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
        """Make an idle engine run one step, so that new weights are applied without waiting for a request."""
        self._inbox.put(None)

    def drain(self) -> None:
        """Let the thread end once all requests are finished; nothing may be submitted afterwards."""
        self._draining = True
        self._inbox.put(None)

    def stop(self) -> None:
        """End the thread after the current step and wait for it; running requests are dropped. May be called again."""
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
            logger.exception("the engine failed and has stopped; no requests are served any more")
            self.failure = error
            deliver([])

    def _loop(self, deliver: Deliver) -> None:
        while not self._stopping and not (self._draining and self._engine.idle and self._inbox.empty()):
            if not self._read_inbox(wait=self._engine.idle and not self._draining):
                self._engine.target.peers.beat()
                continue
            output = EngineOutput([], [], None) if self._stopping else self._engine.step(deliver)
            if output.stats is not None or output.finished:
                self._report(output)

    def _report(self, output: EngineOutput) -> None:
        for part, observe in self._observers.items():
            self.guard.run(part, partial(observe, output, self._engine.load), lambda: None)

    def _read_inbox(self, *, wait: bool) -> bool:
        """Process all messages in the inbox; with `wait`, wait a while for the first one. Returns false if none came in
        that time."""
        found = not wait
        with suppress(queue.Empty):
            message = self._inbox.get(block=wait, timeout=_IDLE_SECONDS)
            found = True
            while True:
                if message is not None:
                    message(self._engine)
                message = self._inbox.get_nowait()
        return found


@contextmanager
def serving(device: torch.device) -> Iterator[None]:
    """Compute in this context on a CUDA stream of higher priority than learning has. Its work runs after earlier work
    of the current stream and before later work. Does nothing on a CPU."""
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
