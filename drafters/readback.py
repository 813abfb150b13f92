"""Numbers and times of a device for books that must not make the host wait: known one step late, at once on a CPU."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

Observe = Callable[[Sequence[float]], None]


class Timestamp(Protocol):
    """A point in time; those before it may be subtracted once it is known."""

    def __sub__(self, earlier: Any, /) -> float:
        """Seconds since."""


Clock = Callable[[], Timestamp]


class Readback:
    """Numbers that somebody is to be told, one request per step: of a CPU at once, of a device what the request before
    asked for. A step waits for its tokens, so by then it is here."""

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self._asked: tuple[Tensor, torch.cuda.Event | None, Observe] | None = None

    def read(self, values: Tensor, observe: Observe) -> None:
        """Have `observe` told these values, now or at the next request. # values [count]"""
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
    """When the device gets to what this stream is asked for next."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, earlier: "DeviceTimestamp", /) -> float:
        self._event.synchronize()  # planned transfer: of steps that are read, a moment
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1e3


def readback_of(device: torch.device | str) -> Readback:
    """Readback of tensors on this device."""
    return Readback(late=torch.device(device).type != "cpu")


def clock_of(device: torch.device | str) -> Clock:
    """The time at which this device does what it is asked for."""
    return perf_counter if torch.device(device).type == "cpu" else DeviceTimestamp


def reached(values: Tensor) -> torch.cuda.Event | None:
    """When everything that a device has been asked for up to here is done; None where there is none."""
    if not values.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return event
