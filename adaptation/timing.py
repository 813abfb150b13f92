"""Decides when training may compute: in the server's pauses, or, on a server without pauses, while the ledger covers
how much training slows serving."""

import contextlib
import math
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterator
from typing import TypeVar, cast

import torch

from drafters.decision import GainPosterior

Result = TypeVar("Result")
Pieces = Generator[None, None, Result]
"""Generator that yields between pieces of work, so that queries and commands come first, and returns the result.
Closing it undoes the work so far."""


def completed(pieces: Pieces[Result]) -> Result:
    """Run all pieces at once and return the result."""
    try:
        while True:
            next(pieces)
    except StopIteration as end:
        return cast(Result, end.value)


_PRIOR_DELAY, _DELAY_NOISE = 0.3, 0.5  # prior relative delay of a step during training (on two cores), noise of samples
_LEAST_DELAY = 0.05  # least relative delay: caches and memory are shared at any priority, and noise hides a smaller one
_MEMORY_STEPS = 128  # window of a mean step time
_NEW_SHARE = 1 / 16  # of the replay buffer: fewer new texts hardly change what a pass in vain has learnt
_BETWEEN_STEPS_SECONDS = 0.05  # serving counts as busy for this long after a step: longer than the gap before the next
_UNUSED_SECONDS = 0.15  # of a pause: those above, and until the learning thread looks again
_LEAST_IDLE = 0.05  # least share of idle time that counts as pauses: less is the clients' own delay
_REMEMBERED_SECONDS = 86_400.0  # over which that share is taken: what was recorded by day trains at night
_LONGEST_STEP_SECONDS = 30.0  # serving counts as busy for this long after the start of a step without a recorded end


class StepDelay:
    """Estimates how much longer an engine step takes while training computes, from steps of the same variant."""

    def __init__(self) -> None:
        self._alone: dict[Hashable, tuple[float, int]] = {}  # mean log of steps without training, number of steps
        drift = (_DELAY_NOISE / _MEMORY_STEPS) ** 2
        self._delay = GainPosterior(mean=_PRIOR_DELAY, sd=_PRIOR_DELAY, noise=_DELAY_NOISE, drift=drift)

    def observe(self, variant: Hashable, seconds: float, *, trains: bool) -> None:
        """Add the duration of one step; `trains`: whether training computed during it. The mean is geometric, so that
        outliers hardly count."""
        mean, count = self._alone.get(variant, (0.0, 0))
        if not trains:
            count = min(count + 1, _MEMORY_STEPS)
            self._alone[variant] = mean + (math.log(seconds) - mean) / count, count
        elif count:
            self._delay.observe(seconds / math.exp(mean) - 1.0)

    @property
    def share(self) -> float:
        """Seconds that serving loses per second of simultaneous training."""
        delay = max(_LEAST_DELAY, self._delay.mean)
        return delay / (1.0 + delay)


class Brake:
    """Stops a process at once and continues it, by signals. May be used from any thread."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.may_stop = False  # whether the process computes what can wait, and would end with its parent while stopped
        self._is_on = False
        self._lock = threading.Lock()

    @property
    def is_stopped(self) -> bool:
        """Whether the process has stopped computing."""
        return self._is_on and self.may_stop

    def stop(self) -> None:
        """Stop the process if it may be stopped, until `go_on`."""
        with self._lock:
            if self.may_stop and not self._is_on and self.process is not None:
                self.process.send_signal(signal.SIGSTOP)
                self._is_on = True

    def go_on(self) -> None:
        """Continue the process."""
        with self._lock:
            if self._is_on and self.process is not None:
                self.process.send_signal(signal.SIGCONT)
            self._is_on = False


class Pauses:
    """Measures the share of the time since the first step in which the server was idle."""

    def __init__(self, *, needed: bool = False) -> None:
        """`needed`: learning may take nothing from a server without pauses."""
        self.needed = needed
        self._idle_seconds = self._seconds = 0.0

    def add(self, seconds: float, *, idle_seconds: float = 0.0) -> None:
        """Add a step, or the time between two with what was idle of it. Called by the engine's thread."""
        kept = math.exp(-seconds / _REMEMBERED_SECONDS)
        self._seconds = self._seconds * kept + seconds
        self._idle_seconds = self._idle_seconds * kept + idle_seconds

    @property
    def exist(self) -> bool:
        """Whether the server has pauses to train in."""
        return self._idle_seconds > _LEAST_IDLE * self._seconds

    def suffice(self) -> bool:
        """Whether learning may take time from serving: the server has pauses, or none are needed."""
        return not self.needed or self.exist


class TrainingTime:
    """Measures the seconds of training and what they take from serving, and decides whether training may go on: always
    while the server is idle; beside requests only on a server without pauses, as long as the ledger covers what was
    taken."""

    def __init__(
        self,
        device: torch.device,
        covers: Callable[[float], bool],
        pauses: Pauses | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`device`: device of the training thread; `covers`: returns whether the ledger covers this many more seconds;
        `pauses`: measures them, and may forbid to take any."""
        self.seconds = 0.0
        self.brake: Brake | None = None  # of the training process; None: the training thread computes
        self._covers = covers
        self._cpu_clock = time.thread_time if device.type == "cpu" else time.perf_counter
        self._clock = clock
        self._process_seconds = self._uncharged = 0.0
        self._step_began_at = self._step_ended_at = -math.inf
        self.pauses = pauses or Pauses()
        self._computes = False
        self._delay = StepDelay()

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """Context manager that measures training seconds, and charges what they take from serving if serving is busy at
        the end and has not stopped the process."""
        began, self._computes = self._cpu_clock() + self._process_seconds, True
        try:
            yield
        finally:
            self._computes = False
            seconds = self._cpu_clock() + self._process_seconds - began
            self.seconds += seconds
            self._uncharged += 0.0 if self.is_idle or self._is_stopped else seconds * self.taken_share

    def add_process_seconds(self, seconds: float) -> None:
        """Add CPU seconds of the training process to the context under way."""
        self._process_seconds += seconds

    def stepped(self, variant: Hashable, seconds: float) -> bool:
        """Record an engine step; steps of one variant take equally long. Returns False if training slowed it. Called by
        the engine's thread."""
        self._step_ended_at = self._clock()
        self.pauses.add(seconds)
        trains = self._computes and not self._is_stopped
        self._delay.observe(variant, seconds, trains=trains)
        return not trains or self.brake is not None  # beside a process at idle priority budgets learn all the same

    def stepping(self) -> None:
        """Record the start of an engine step that has work, and stop a training process that can go on in the next
        pause. Called by the engine's thread."""
        now = self._clock()
        between = now - max(self._step_began_at, self._step_ended_at)
        if between < math.inf:
            self.pauses.add(between, idle_seconds=max(0.0, between - _UNUSED_SECONDS))
        self._step_began_at = now
        if self.brake is not None and self.pauses.exist:
            self.brake.stop()

    def skip_pause(self) -> None:
        """Do not count the time since the last step, in which the server could not serve, as a pause."""
        self._step_began_at = self._step_ended_at = -math.inf

    @property
    def _is_stopped(self) -> bool:
        return self.brake is not None and self.brake.is_stopped

    @property
    def is_idle(self) -> bool:
        """Whether no request is being served, judged by when the last step began and ended."""
        now, is_within = self._clock(), self._step_began_at > self._step_ended_at
        busy_until = (
            self._step_began_at + _LONGEST_STEP_SECONDS if is_within else self._step_ended_at + _BETWEEN_STEPS_SECONDS
        )
        return now >= busy_until

    @property
    def taken_share(self) -> float:
        """Seconds that serving loses per second of simultaneous training."""
        return self._delay.share

    def taken(self) -> float:
        """Return the seconds taken from serving since the last call."""
        seconds, self._uncharged = self._uncharged, 0.0
        return seconds

    @property
    def may_compute(self) -> bool:
        """Whether training may go on: the server is idle, or has no pauses and the ledger covers what was taken."""
        may_disturb = not (self.pauses.needed or self.pauses.exist)
        return self.is_idle or (may_disturb and self._covers(self._uncharged))


class IdleTime:
    """Limits updates in idle time to a share of that time. After a pass over the replay buffer that led to nothing, it
    allows no more until new texts worth a share of the buffer have come."""

    def __init__(self, *, share: float, least_failures: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`share`: 0 to 1; `least_failures`: completed updates in a row that were no better, at least."""
        self._share = share
        self._least_failures = least_failures
        self._clock = clock
        self._rests_until = 0.0
        self._num_failures = 0
        self._num_added = 0  # texts added when the failures were last counted from 0

    def may_begin(self, num_added: int, *, num_kept: int, pass_updates: int) -> bool:
        """Whether another update may begin. `num_added`: texts added to the buffer since start; `num_kept`: texts in
        it; `pass_updates`: updates that train on each of them once."""
        if num_added - self._num_added >= max(1.0, _NEW_SHARE * num_kept):
            self._num_added, self._num_failures = num_added, 0
        has_time = self._share > 0 and self._clock() >= self._rests_until
        return has_time and self._num_failures < max(self._least_failures, pass_updates)

    def ended(self, seconds: float, *, better: bool) -> None:
        """Record the end of an update that took `seconds`; `better`: the judge found that it led to something."""
        self._rests_until = self._clock() + seconds * (1.0 / self._share - 1.0)
        self._num_failures = 0 if better else self._num_failures + 1
