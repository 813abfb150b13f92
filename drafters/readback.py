"""Reads numbers and times from a device, and makes the host wait as late as possible or not at all."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

Observe = Callable[[Any], None]
"""Callback that gets the numbers that were read back, as lists."""


class Timestamp(Protocol):
    """A point in time, from which an earlier one can be subtracted."""

    def __sub__(self, earlier: Any, /) -> float:
        """Return the seconds since `earlier`."""


Clock = Callable[[], Timestamp]
"""Returns a timestamp of the current point in a device's work."""


Arriving = Callable[[], Tensor]
"""Waits until numbers have come from a device, and returns them. # -> [...], on the host"""


def arriving(values: Tensor, *, at_once: bool = False) -> Arriving:
    """Begin to copy values to the host. They may be overwritten then, unless they are on the host and read `at_once`.
    # values [...]"""
    if at_once and values.device.type == "cpu":
        return lambda: values
    on_the_way = values.to("cpu", non_blocking=True, copy=True)  # to pinned memory
    copied = reached(values)

    def arrived() -> Tensor:
        if copied is not None:
            copied.synchronize()  # planned transfer: the wait of a step
        return on_the_way

    return arrived


class Readback:
    """Passes numbers from a device to callbacks, with one request per step. On a CPU the callback runs at once. On a
    GPU each request runs the callback of the previous one, whose copy has arrived because each step waits for its
    tokens."""

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self._asked: tuple[Arriving, Observe] | None = None

    def read(self, values: Tensor, observe: Observe) -> None:
        """Call `observe` with these values, now or at the next request. # values [count] or [lines, count]"""
        if not self._late:
            observe(values.tolist())  # planned transfer: none, it is on the host
            return
        if self._asked is not None:
            before, observe_before = self._asked
            observe_before(before().tolist())  # planned transfer: none, it is on the host
        self._asked = arriving(values), observe


class DeviceTimestamp:
    """Timestamp of a GPU: the time at which it reaches this point of the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, earlier: "DeviceTimestamp", /) -> float:
        self._event.synchronize()  # planned transfer: short, the step has ended by then
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1e3


def readback_of(device: torch.device | str) -> Readback:
    """Return a `Readback` for tensors on this device."""
    return Readback(late=torch.device(device).type != "cpu")


def clock_of(device: torch.device | str) -> Clock:
    """Return a clock that measures the work of this device."""
    return perf_counter if torch.device(device).type == "cpu" else DeviceTimestamp


def reached(values: Tensor) -> torch.cuda.Event | None:
    """Return an event that follows all work queued so far on the current stream of the tensor's device. Returns None on
    a CPU. # values [...]"""
    if not values.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return event
