"""The side thread that learns: observes finished queries, trains between them, and never holds the engine up.

The engine's calls put something into a bounded queue and return. Nothing that breaks in here reaches anybody else: it
is counted, told, and learning goes on from what is served. On a CUDA device it computes on a stream of its own, and
`received` is the only place where tensors of serving enter learning.
"""

import logging
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from adaptation.trainer import UpdateReport
from drafters.feedback import DraftLabels, QueryFeedback

logger = logging.getLogger(__name__)

Stage = Literal["observe", "update", "command", "recover", "save"]
Result = TypeVar("Result")
_Command = tuple[Future[Any], Callable[[], object]]
_IDLE_SECONDS = 0.5
_NICEST = 19


class Loop(Protocol):
    """What the thread runs: the learner, or in tests one that breaks on purpose."""

    def observe(self, feedback: QueryFeedback) -> object: ...

    def update(self, interrupted: Callable[[], bool]) -> UpdateReport | None: ...

    def recover(self, error: str) -> None: ...

    def save(self, *, training: bool) -> None: ...


class Worker:
    """Owner of the adaptation thread. A thread that was killed is replaced at the next query."""

    def __init__(
        self,
        loop: Loop,
        *,
        max_waiting: int,
        niceness: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """`niceness`: by how much the thread gives way to others that want the CPU, where the system allows it;
        `device`: where the loop computes, on a stream that gives way too."""
        self.failures: Counter[Stage] = Counter()
        self.num_dropped = 0  # queries that nobody observed
        self.num_restarts = 0
        self.loop = loop  # who replaces it does so before the start
        self.trains = True  # False: queries are observed, and updates are not computed; written by any thread
        self._max_waiting = max_waiting
        self._niceness = niceness
        self._device = device or torch.device("cpu")
        self._waiting: deque[QueryFeedback] = deque()
        self._commands: deque[_Command] = deque()
        self._urgent: deque[_Command] = deque()
        self._ready = threading.Condition()
        self._stopping = threading.Event()
        self._nothing_due = threading.Event()
        self._more_due = False  # one update has been done, and another may wait
        self._busy = False
        self._thread: threading.Thread | None = None
        self._reviving = threading.Lock()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        assert not self.alive, "started twice"
        self._thread = threading.Thread(target=self._run, name="adaptation", daemon=True)
        self._thread.start()

    def offer(self, feedback: QueryFeedback) -> None:
        """Hand over a finished query; of too many the oldest is dropped. Called by the engine thread."""
        with self._ready:
            if len(self._waiting) >= self._max_waiting:
                self._waiting.popleft()
                self.num_dropped += 1
            self._waiting.append(feedback)
            self._nothing_due.clear()
            self._ready.notify()
        self._revive()

    @property
    def is_urged(self) -> bool:
        """Whether updates are to end at once: for an urgent command, or because the thread ends."""
        return bool(self._urgent) or self._stopping.is_set()

    def ask(self, command: Callable[[], Result], *, urgent: bool = False) -> "Future[Result]":
        """Run something in the thread that owns the learner, before the next query; `urgent` breaks an update off."""
        answer: Future[Result] = Future()

        with self._ready:
            (self._urgent if urgent else self._commands).append((answer, command))
            self._ready.notify()
        self._revive()
        if self._stopping.is_set():
            answer.cancel()
        return answer

    def settle(self, timeout_seconds: float) -> bool:
        """Wait until every query is observed and no update is due; False if that took too long."""
        return self._nothing_due.wait(timeout_seconds)

    def stop(self, timeout_seconds: float = 5.0) -> bool:
        """End the thread; True if it has ended in time. An update under way is broken off between its steps."""
        self._stopping.set()
        with self._ready:
            self._ready.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        for answer, _ in (*self._urgent, *self._commands):
            answer.cancel()
        return not self.alive

    def _revive(self) -> None:
        """Called by the engine's thread and by operators': only one of them may start another."""
        with self._reviving:
            if self._thread is None or self._thread.is_alive() or self._stopping.is_set():
                return
            self.num_restarts += 1
            logger.error("the adaptation thread has died; starting another one")
            self.start()

    def _run(self) -> None:
        bound_threads(1)
        step_back(self._niceness)
        with beside(self._device):
            if self._busy:  # the thread before died in the middle of something
                self._guard("recover", lambda: self.loop.recover("thread_died"))
            while not self._stopping.is_set():
                self._turn()
            self._guard("save", lambda: self.loop.save(training=True))

    def _turn(self) -> None:
        """The next thing there is to do, commands first."""
        command = feedback = None
        with self._ready:
            if not (self._urgent or self._commands or self._waiting or self._stopping.is_set()):
                self._ready.wait(0.0 if self._more_due else _IDLE_SECONDS)
            if self._urgent:
                command = self._urgent.popleft()
            elif self._commands:
                command = self._commands.popleft()
            elif self._waiting:
                feedback = self._waiting.popleft()
        if command is not None:
            self._attempt("command", partial(_carry_out, *command))
        elif feedback is not None:
            self._attempt("observe", partial(self.loop.observe, feedback))
        if not self.is_urged:
            self._attempt("update", self._update)

    def _update(self) -> None:
        self._more_due = False  # nor after one that failed
        self._more_due = self.trains and self.loop.update(self._interrupted) is not None
        with self._ready:
            if not (self._more_due or self._waiting or self._commands or self._urgent):
                self._nothing_due.set()

    def _interrupted(self) -> bool:
        return self.is_urged or not self.trains

    def _attempt(self, stage: Stage, action: Callable[[], object]) -> None:
        self._busy = True
        error = self._guard(stage, action)
        if error is not None:
            self._guard("recover", lambda: self.loop.recover(f"{stage}: {type(error).__name__}: {error}"))
        self._busy = False

    def _guard(self, stage: Stage, action: Callable[[], object]) -> Exception | None:
        """Learning may fail in any way; serving must not notice."""
        try:
            action()
        except Exception as error:
            self.failures[stage] += 1
            logger.exception("learning failed in stage %s", stage)
            return error
        return None


def _carry_out(answer: Future[Any], command: Callable[[], object]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(command())
    except Exception as error:
        answer.set_exception(error)
        raise
    except BaseException:  # what ends this thread must not end the one that asked
        answer.set_exception(RuntimeError("the adaptation thread died over this command"))
        raise


def step_back(niceness: int) -> None:
    """Let other threads have the CPU first. Only Linux keeps a niceness per thread."""
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        wanted = os.getpriority(os.PRIO_PROCESS, thread) + niceness
        os.setpriority(os.PRIO_PROCESS, thread, min(wanted, _NICEST))


def bound_threads(number: int) -> None:
    """Bound the torch threads of the calling thread alone.

    torch takes the last number anybody set for threads that have not computed yet. A thread that ends at once sets it
    back, or an engine thread that starts later would compute with another number, and so other sums.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(number)
    setter = threading.Thread(target=torch.set_num_threads, args=(usual,))
    setter.start()
    setter.join()


LOW_PRIORITY = 0
"""The lowest there is; serving takes -1."""


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Compute on a stream that gives way to serving, behind what was asked for until now; nothing changes on a CPU."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device, priority=LOW_PRIORITY)
    stream.wait_stream(torch.cuda.current_stream(device))  # which may still fill the copies that are trained
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def received(feedback: QueryFeedback, device: torch.device) -> QueryFeedback:
    """A finished query, safe to be read by the calling thread's stream, on the device that learns."""
    if feedback.ready is None:
        return feedback
    feedback.ready.synchronize()
    labels = feedback.draft_labels
    draft_labels = DraftLabels(*(_taken(getattr(labels, name), device) for name in DraftLabels.__slots__))
    return replace(
        feedback,
        features=_taken(feedback.features, device),
        top_ids=_taken(feedback.top_ids, device),
        top_logprobs=_taken(feedback.top_logprobs, device),
        draft_labels=draft_labels,
        ready=None,
    )


def _taken(value: Tensor, device: torch.device) -> Tensor:
    """Its memory must not be given to another tensor of serving before this stream has read it."""
    value.record_stream(torch.cuda.current_stream(value.device))
    return value.to(device)
