"""Numbers of the host on their way to a device."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor


def send(device: torch.device, *columns: Sequence[int]) -> tuple[Tensor, ...]:
    """All columns as int64 in one transfer that nobody waits for: it starts in pinned memory, which torch keeps until
    the device has read it."""
    together = _sent(device, list(chain.from_iterable(columns)), torch.int64)
    return torch.split(together, list(map(len, columns)))


def send_floats(device: torch.device, values: Sequence[float]) -> Tensor:
    """The same for one column, as float32."""
    return _sent(device, values, torch.float32)


def _sent(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
