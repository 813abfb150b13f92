"""Reads numbers and times of a device without making the host wait: one step late, at once on a CPU."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

Observe = Callable[[Sequence[float]], None]
"""Callback for numbers that were read back."""


class Timestamp(Protocol):
    """A point in time; an earlier one can be subtracted from it."""

    def __sub__(self, earlier: Any, /) -> float:
        """Return the seconds since `earlier`."""


Clock = Callable[[], Timestamp]


class Readback:
    """Passes numbers to callbacks, one request per step: at once on a CPU; on a device each request delivers the one
    before, whose copy has arrived because a step waits for its tokens."""

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self._asked: tuple[Tensor, torch.cuda.Event | None, Observe] | None = None

    def read(self, values: Tensor, observe: Observe) -> None:
        """Call `observe` with these values, now or at the next request. # values [count]"""
        if not self._late:
            observe(values.tolist())  # planned transfer: none, it is here
            return
        if self._asked is not None:
            before, arrived, observe_before = self._asked
            if arrived is not None:
                arrived.synchronize()  # planned transfer: has arrived long since
            observe_before(before.tolist())  # planned transfer: none, it is here
        on_the_way = values.to("cpu", non_blocking=True, copy=True)  # into pinned memory
        self._asked = on_the_way, reached(values), observe


class DeviceTimestamp:
    """The time at which the device reaches this point of the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, earlier: "DeviceTimestamp", /) -> float:
        self._event.synchronize()  # planned transfer: of steps that are read, a moment
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1e3


def readback_of(device: torch.device | str) -> Readback:
    """Return a readback for tensors on this device."""
    return Readback(late=torch.device(device).type != "cpu")


def clock_of(device: torch.device | str) -> Clock:
    """Return a clock of this device: time stamps in the order of its work."""
    return perf_counter if torch.device(device).type == "cpu" else DeviceTimestamp


def reached(values: Tensor) -> torch.cuda.Event | None:
    """Return an event for all work queued so far on the tensor's device, None on a CPU. # values [...]"""
    if not values.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return event
