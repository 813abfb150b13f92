"""Transfers of numbers from the host to a device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | npt.NDArray[np.int64] | npt.NDArray[np.float64]


def send(device: torch.device, *columns: Numbers) -> tuple[Tensor, ...]:
    """All columns as int64 in one asynchronous transfer from pinned memory, which torch keeps until the device has read
    it.
    # -> [length] each"""
    together = _sent(device, np.concatenate([np.asarray(column, dtype=np.int64) for column in columns]))
    return together.split_with_sizes([len(column) for column in columns])


def send_lines(device: torch.device, *columns: Sequence[int]) -> tuple[Tensor, ...]:
    """`send` for lists of equal length. # -> [length] each"""
    return _sent(device, np.array(columns, dtype=np.int64)).unbind()


def send_floats(device: torch.device, values: Numbers) -> Tensor:
    """`send` for one column, as float32. # -> [length]"""
    return _sent(device, np.asarray(values, dtype=np.float32))


def _sent(device: torch.device, values: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> Tensor:
    here = torch.from_numpy(values)
    if device.type == "cpu":
        return here
    pinned = torch.empty(here.shape, dtype=here.dtype, pin_memory=device.type == "cuda")
    return pinned.copy_(here).to(device, non_blocking=True)
