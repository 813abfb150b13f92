"""Decides when training may compute: as far as the ledger covers what it takes from serving, and in idle time; and
measures which type of numbers computes faster.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator

import torch

from drafters.regret import GainPosterior

_PRIOR_DELAY, _DELAY_NOISE = 0.3, 0.5  # of a step beside training, in steps: measured on two cores; spread of one step
_MEMORY_STEPS = 128  # that a mean of step times remembers
_POLL_SECONDS = 0.05
_BUSY_SECONDS = 1.0  # after the begin of a step in which serving counts as busy: longer than most steps


_PRODUCT_ROWS, _PRODUCT_INPUTS, _PRODUCT_OUTPUTS = 256, 512, 1024  # of a product that takes some milliseconds
_PRODUCT_TRIALS = 5


class StepDelay:
    """Estimates how much longer an engine step takes while training computes, from steps of the same variant."""

    def __init__(self) -> None:
        self._alone: dict[Hashable, tuple[float, int]] = {}  # mean log of steps without training, number of steps
        drift = (_DELAY_NOISE / _MEMORY_STEPS) ** 2
        self._delay = GainPosterior(mean=_PRIOR_DELAY, sd=_PRIOR_DELAY, noise=_DELAY_NOISE, drift=drift)

    def observe(self, variant: Hashable, seconds: float, *, trains: bool) -> None:
        """Add one step; `trains`: training computed beside it. The mean is geometric, so that outliers hardly count."""
        mean, count = self._alone.get(variant, (0.0, 0))
        if not trains:
            count = min(count + 1, _MEMORY_STEPS)
            self._alone[variant] = mean + (math.log(seconds) - mean) / count, count
        elif count:
            self._delay.observe(seconds / math.exp(mean) - 1.0)

    @property
    def share(self) -> float:
        """Share of the time of training that serving loses."""
        delay = max(0.0, self._delay.mean)
        return delay / (1.0 + delay)


class TrainingTime:
    """Measures seconds of training, charges what they take from serving, and says when training has to wait.

    Training beside serving goes on only as far as the ledger covers its charge: a process is stopped wherever it is, a
    thread waits between two optimizer steps or two replays.
    """

    def __init__(
        self,
        device: torch.device,
        covers: Callable[[float], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`device`: where a thread trains; `covers`: whether the ledger covers so many seconds more."""
        self.seconds = 0.0
        self.urged = threading.Event()  # what is under way is to end at once
        self.covers = covers  # asked each time that training asks whether to go on; may be replaced
        self._cpu_clock = time.thread_time if device.type == "cpu" else time.perf_counter
        self._clock, self._sleep = clock, sleep
        self._correction = 0.0  # seconds that a process computed, less those that the thread slept
        self._uncharged = 0.0
        self._stepped_at = self._polled_at = -math.inf
        self._computes = False
        self._delay = StepDelay()

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """Measure and charge what runs in this context."""
        began = self._cpu_clock() + self._correction
        self._polled_at, self._computes = self._clock(), True
        try:
            yield
        finally:
            self.may_compute()
            self._computes = False
            self.seconds += self._cpu_clock() + self._correction - began

    def add_process_seconds(self, seconds: float) -> None:
        """Count CPU seconds of another process that this thread waited for."""
        self._correction += seconds

    def stepped(self, variant: Hashable, seconds: float) -> bool:
        """Record an engine step; steps of one variant take equally long. Called by the engine's thread.
        # -> whether no training ran beside it"""
        self._stepped_at = self._clock()
        trains = self._computes
        self._delay.observe(variant, seconds, trains=trains)
        return not trains

    def stepping(self) -> None:
        """Record that an engine step begins. Called by the engine's thread."""
        self._stepped_at = self._clock()

    @property
    def is_idle(self) -> bool:
        """Whether no request is served."""
        return self._clock() - self._stepped_at >= _BUSY_SECONDS

    @property
    def taken_share(self) -> float:
        """Share of the time of training beside serving that serving loses."""
        return self._delay.share

    def taken(self) -> float:
        """Return the seconds taken from serving since the last call."""
        seconds, self._uncharged = self._uncharged, 0.0
        return seconds

    def wait(self, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Wait until a thread may compute; called between its steps, within `spent`. # -> whether to end instead"""
        while not (is_interrupted := interrupted()) and not self.may_compute():
            before = self._cpu_clock()
            self._sleep(_POLL_SECONDS)
            self._correction -= self._cpu_clock() - before
        return is_interrupted

    def may_compute(self) -> bool:
        """Charge what was computed since the last call. # -> whether training may go on: the server is idle, the ledger
        covers the charge, or training is urged to end"""
        if self._computes and not self.is_idle:
            self._uncharged += (self._clock() - self._polled_at) * self.taken_share
        is_covered = self.covers(self._uncharged)
        self._polled_at = self._clock()  # nothing is computed while it is asked
        self._computes = is_covered or self.is_idle or self.urged.is_set()
        return self._computes


class IdleTime:
    """Limits updates in idle time to a share of it, and stops them after several that published nothing until new texts
    arrive."""

    def __init__(self, *, share: float, max_failures: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`share`: 0 to 1; `max_failures`: completed updates in a row that published nothing."""
        self._share = share
        self._max_failures = max_failures
        self._clock = clock
        self._rests_until = 0.0
        self._num_failures = 0
        self._num_texts = 0  # at the last update

    def may_begin(self, num_texts: int) -> bool:
        """Whether another update may begin. `num_texts`: texts there were so far, in all."""
        if num_texts != self._num_texts:
            self._num_texts, self._num_failures = num_texts, 0
        return self._share > 0 and self._clock() >= self._rests_until and self._num_failures < self._max_failures

    def ended(self, seconds: float, *, published: bool | None) -> None:
        """Record an update of so many seconds. `published`: None if it was interrupted."""
        self._rests_until = self._clock() + seconds * (1.0 / self._share - 1.0)
        if published is not None:
            self._num_failures = 0 if published else self._num_failures + 1


def bf16_is_faster(device: torch.device, clocked: Callable[[torch.dtype], float] | None = None) -> bool:
    """Whether matrix products in bf16 are faster than in fp32.

    On a CPU this is measured, in some hundredths of a second: with matrix units bf16 is up to ten times as fast,
    without them half as fast, whatever instruction sets the CPU reports. `clocked`: seconds of a product in a type.
    """
    if device.type != "cpu":
        return True
    clocked = clocked or _product_seconds
    trials = [(clocked(torch.bfloat16), clocked(torch.float32)) for _ in range(_PRODUCT_TRIALS)]
    return min(bf16 for bf16, _ in trials) < min(fp32 for _, fp32 in trials)


def _product_seconds(dtype: torch.dtype) -> float:
    x = torch.ones(_PRODUCT_ROWS, _PRODUCT_INPUTS, dtype=dtype)
    weight = torch.ones(_PRODUCT_OUTPUTS, _PRODUCT_INPUTS, dtype=dtype)
    began = time.perf_counter()
    torch.nn.functional.linear(x, weight)
    return time.perf_counter() - began
