"""The learning thread: observes finished queries and trains between them, without ever blocking the engine.

The engine only adds to a bounded queue. An exception in the loop is counted and logged, and the loop recovers from it;
serving is unaffected. On a CUDA device the thread computes on its own stream, and `received` is the only place where
tensors of serving enter learning.
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
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from adaptation.records import Stage
from drafters.feedback import DraftLabels, QueryFeedback

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_Command = tuple[Future[Any], Callable[[], object]]
_POLL_SECONDS = 0.1  # shortest interval between two checks for due work
_LONGEST_POLL_SECONDS = 1.0  # the interval doubles up to this while no work is due
_MAX_NICENESS = 19


class Loop(Protocol):
    """Interface of the learner that the thread runs."""

    def observe(self, feedback: QueryFeedback) -> object:
        """Observe one finished query."""

    def work(self) -> bool:
        """Do the next piece of an update, and begin an update if one is due. Returns whether a piece was done."""

    def abandon(self) -> None:
        """Undo the update under way, if any."""

    def recover(self, error: str) -> None:
        """Restore a consistent state after an exception in any call."""

    def forget(self, scope: str | None) -> None:
        """Forget all texts of a scope, or of all scopes if it is None."""

    def save(self, *, training: bool) -> None:
        """Store the state; `training`: also the training copy."""


class Inbox:
    """Queue of commands and finished queries for the learning thread. Commands come first."""

    def __init__(self, max_queries: int) -> None:
        self.num_dropped = 0  # queries dropped because the queue was full
        self.queries: deque[QueryFeedback] = deque()
        self.stopping = False
        self._max_queries = max_queries
        self._commands: deque[_Command] = deque()
        self._ready = threading.Condition()

    def put_query(self, feedback: QueryFeedback) -> None:
        """Add a query; if the queue is full, the oldest is dropped."""
        with self._ready:
            if len(self.queries) >= self._max_queries:
                self.queries.popleft()
                self.num_dropped += 1
            self.queries.append(feedback)
            self._ready.notify()

    def put_command(self, command: Callable[[], Result]) -> "Future[Result]":
        """Add a command. Returns the Future of its result, which is cancelled if the thread ends first."""
        answer: Future[Result] = Future()
        with self._ready:
            self._commands.append((answer, command))
            self._ready.notify()
        if self.stopping:
            answer.cancel()
        return answer

    def take(self, timeout_seconds: float) -> QueryFeedback | _Command | None:
        """Remove and return the next command, else the next query. Returns None after a timeout, or if the thread is
        stopping."""
        waiting = (self._commands, self.queries)
        with self._ready:
            if not (any(waiting) or self.stopping):
                self._ready.wait(timeout_seconds)
            return next((queue.popleft() for queue in waiting if queue), None)

    def forget(self, scope: str | None) -> None:
        """Drop the waiting queries of a scope, or all if it is None."""
        with self._ready:
            kept = [one for one in self.queries if scope not in (None, one.query.scope)]
            self.queries.clear()  # the same queue, for which `take` waits
            self.queries.extend(kept)

    def stop(self) -> None:
        """Ask the thread to end."""
        with self._ready:
            self.stopping = True
            self._ready.notify_all()

    def cancel_commands(self) -> None:
        """Cancel all commands that still wait."""
        for answer, _ in self._commands:
            answer.cancel()


class Worker:
    """Owner of the adaptation thread. A thread that died is replaced at the next query."""

    def __init__(
        self,
        loop: Loop,
        *,
        max_waiting: int,
        niceness: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """`max_waiting`: size of the queue of queries; `niceness`: added to the thread's niceness, on Linux; `device`:
        device of the loop, which computes there on a stream of low priority."""
        self.failures: Counter[Stage] = Counter()
        self.num_restarts = 0
        self.loop = loop  # may be replaced before `start`
        self.on_death: Callable[[], None] = lambda: None  # called by the thread that replaces a dead one
        self.trains = True  # False: queries are observed, and no update is computed; set from any thread
        self.inbox = Inbox(max_waiting)
        self.niceness = niceness
        self._device = device or torch.device("cpu")
        self._pause_seconds = _POLL_SECONDS  # longest wait for a command or query; 0: a piece of an update may be due
        self._busy = False
        self._thread: threading.Thread | None = None
        self._reviving = threading.Lock()

    @property
    def works(self) -> bool:
        """Whether a piece of an update may be due."""
        return not self._pause_seconds

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        assert not self.alive, "started twice"
        self._thread = threading.Thread(target=self._run, name="adaptation", daemon=True)
        self._thread.start()

    def offer(self, feedback: QueryFeedback) -> None:
        """Queue a finished query; if the queue is full, the oldest is dropped. Called by the engine thread."""
        self.inbox.put_query(feedback)
        self._revive()

    def ask(self, command: Callable[[], Result]) -> "Future[Result]":
        """Queue a function for the learning thread, ahead of queries and of the next piece of an update, and return the
        Future of its result."""
        answer = self.inbox.put_command(command)
        self._revive()
        return answer

    def forget(self, scope: str | None) -> None:
        """Forget the texts of a scope, or of all scopes, before the next query or piece. Called by the engine thread
        when no query of the scope that is recorded still runs."""
        self.inbox.forget(scope)
        self.ask(partial(self.loop.forget, scope))

    def stop(self, timeout_seconds: float = 5.0) -> bool:
        """End the thread after the piece under way. Returns whether it ended in time."""
        self.inbox.stop()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        self.inbox.cancel_commands()
        return not self.alive

    def _revive(self) -> None:
        """Replace a thread that died. Called from several threads, of which only one may start another."""
        with self._reviving:
            if self._thread is None or self._thread.is_alive() or self.inbox.stopping:
                return
            self.num_restarts += 1
            logger.error("the adaptation thread has died; starting another one")
            self.on_death()
            self.start()

    def _run(self) -> None:
        lower_priority(self.niceness)
        with low_priority_stream(self._device):
            if self._busy:  # the previous thread died while it ran a command, a query or a piece
                self._guard("recover", lambda: self.loop.recover("thread_died"))
            while not self.inbox.stopping:
                self._turn()
            self._guard("save", lambda: self.loop.save(training=True))

    def _turn(self) -> None:
        """Run one command, else observe one query, else do one piece of an update."""
        taken = self.inbox.take(self._pause_seconds)
        if isinstance(taken, tuple):
            self._attempt("command", partial(_carry_out, *taken))
        elif taken is not None:
            self._attempt("observe", partial(self.loop.observe, taken))
        else:
            self._attempt("update", self._work)
        if taken is not None:
            self._pause_seconds = 0.0

    def _work(self) -> None:
        # Set before the piece, so that a failing one waits longer too.
        self._pause_seconds = min(max(_POLL_SECONDS, 2 * self._pause_seconds), _LONGEST_POLL_SECONDS)
        if self.trains and not self.inbox.stopping:
            self._pause_seconds = 0.0 if self.loop.work() else self._pause_seconds
        else:
            self.loop.abandon()

    def _attempt(self, stage: Stage, action: Callable[[], object]) -> None:
        self._busy = True
        error = self._guard(stage, action)
        if error is not None:
            self._guard("recover", lambda: self.loop.recover(f"{stage}: {type(error).__name__}: {error}"))
        self._busy = False

    def _guard(self, stage: Stage, action: Callable[[], object]) -> Exception | None:
        """Run the action; count, log and return its exception."""
        try:
            action()
        except Exception as error:
            self.failures[stage] += 1
            logger.exception("learning failed in stage %s; serving is not affected", stage)
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
    except BaseException:  # an exception that ends this thread must not end the caller's
        answer.set_exception(RuntimeError("the adaptation thread died while it ran this command"))
        raise


def lower_priority(niceness: int) -> None:
    """Add to the calling thread's niceness. Does nothing except on Linux, which keeps a niceness per thread."""
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        wanted = os.getpriority(os.PRIO_PROCESS, thread) + niceness
        os.setpriority(os.PRIO_PROCESS, thread, min(wanted, _MAX_NICENESS))


LOW_PRIORITY = 0
"""CUDA stream priority of training, the lowest; serving has -1."""


@contextmanager
def low_priority_stream(device: torch.device) -> Iterator[None]:
    """Context manager that computes on a CUDA stream of low priority, after all work enqueued so far; no effect on a
    CPU."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device, priority=LOW_PRIORITY)
    stream.wait_stream(torch.cuda.current_stream(device))  # serving may still be filling the training copies
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def received(feedback: QueryFeedback, device: torch.device) -> QueryFeedback:
    """Copy a query to the training device, so that it is safe to read on the calling thread's stream."""
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
        past=None if feedback.past is None else _taken(feedback.past, device),
        regression=None if feedback.regression is None else _taken(feedback.regression, device),
        draft_labels=draft_labels,
        ready=None,
    )


def _taken(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor [...] to the device; serving reuses its memory only after this stream has read it."""
    value.record_stream(torch.cuda.current_stream(value.device))
    return value.to(device)
