"""Numbers of the host on their way to a device."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor


def send(device: torch.device, *columns: Sequence[int]) -> tuple[Tensor, ...]:
    """All columns as int64 in one transfer that nobody waits for: it starts in pinned memory, which torch keeps until
    the device has read it."""
    together = torch.tensor(list(chain.from_iterable(columns)), dtype=torch.int64, pin_memory=device.type == "cuda")
    return torch.split(together.to(device, non_blocking=True), list(map(len, columns)))


def send_floats(device: torch.device, values: Sequence[float]) -> Tensor:
    """The same for one column, as float32."""
    there = torch.tensor(values, dtype=torch.float32, pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)
