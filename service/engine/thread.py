"""The engine's thread: takes requests from a queue, steps while there is work, delivers what each step produced.

Only records cross: requests and aborts in, outputs out. The engine itself is touched by this thread alone.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import torch

from kernels.graph_runner import HIGH_PRIORITY
from service.engine.engine import Engine, StepReport
from service.engine.requests import GenerationRequest, SequenceOutput
from service.engine.stats import LoadStats

logger = logging.getLogger(__name__)

Deliver = Callable[[list[SequenceOutput]], None]
Observe = Callable[[StepReport, LoadStats], None]
_Message = Callable[[Engine], None]
_Result = TypeVar("_Result")
_PATIENCE_SECONDS = 0.1


class EngineThread:
    """Runs an engine; every method may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        observe: Observe = lambda report, load: None,
        ended: Iterable[Callable[[], None]] = (),
    ) -> None:
        """`ended` are called when the thread has been stopped or drained, from the thread."""
        self._engine = engine
        self._observe = observe
        self._ended = ended
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None  # why it ended by itself
        self._stopping = False
        self._draining = False

    @property
    def num_waiting(self) -> int:
        return len(self._engine.scheduler.waiting) + self._inbox.qsize()

    @property
    def num_running(self) -> int:
        return len(self._engine.scheduler.running)

    def start(self, deliver: Deliver) -> None:
        """Begin to run; `deliver` is called from the engine's thread, once per step."""
        self._thread = threading.Thread(target=self._run, args=(deliver,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        self._inbox.put(lambda engine: engine.add(request))

    def abort(self, request_id: str) -> None:
        """Free what the request holds before the next step; nothing more is delivered for it."""

        def end(engine: Engine) -> None:
            self._observe(replace(engine.abort(request_id), outputs=[]), engine.load)

        self._inbox.put(end)

    def forget(self, scope: str | None = None) -> None:
        """Forget past answers of this scope, or of all, before the next step: no later request reads them."""
        self._inbox.put(lambda engine: engine.forget(scope))

    def between_steps(self, call: Callable[[], _Result], unless: threading.Event) -> _Result:
        """What `call` returns, or raises, in the engine's thread before the next step. Raises CancelledError once
        `unless` is set, or the engine has failed; then it may have been called."""
        future = Future[_Result]()

        def answer(engine: Engine) -> None:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(answer)
        while not unless.is_set() and self.failure is None:
            with suppress(TimeoutError):
                return future.result(_PATIENCE_SECONDS)
        raise CancelledError

    def wake(self) -> None:
        """Make an idle engine step once: new weights wait for a step, not for the next request."""
        self._inbox.put(None)

    def drain(self) -> None:
        """Finish what runs, then end the thread; nothing is to be submitted afterwards."""
        self._draining = True
        self._inbox.put(None)

    def stop(self) -> None:
        """End the thread after the step in progress; what still runs is given up. Harmless when repeated."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, deliver: Deliver) -> None:
        try:
            with serving(self._engine.target.device):
                self._loop(deliver)
            for ended in self._ended:
                ended()
        except Exception as error:
            logger.exception("the engine stopped")
            self.failure = error
            deliver([])

    def _loop(self, deliver: Deliver) -> None:
        while not self._stopping and not (self._draining and self._engine.idle and self._inbox.empty()):
            self._read_inbox(wait=self._engine.idle and not self._draining)
            report = StepReport([], [], None) if self._stopping else self._engine.step()
            if report.outputs:
                deliver(report.outputs)
            if report.stats is not None or report.finished:
                self._observe(report, self._engine.load)

    def _read_inbox(self, *, wait: bool) -> None:
        """Apply all messages that have arrived; with nothing to do, wait for the first."""
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
    """Compute on a stream of higher priority than that of learning, behind what was asked for until now and before what
    is asked for later; nothing changes on a CPU."""
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
