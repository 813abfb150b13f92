"""In which type a device multiplies faster, for those who may choose."""

import time
from collections.abc import Callable

import torch

_ROWS, _INPUTS, _OUTPUTS = 256, 512, 1024  # of a product that takes some milliseconds
_TRIALS = 5

Clocked = Callable[[torch.dtype], float]


def bf16_is_faster(device: torch.device, clocked: Clocked | None = None) -> bool:
    """Whether products of bf16 numbers take less time than those of fp32 ones.

    On a CPU this is timed, in some hundredths of a second: with matrix units they are up to ten times as fast, and
    where the process does without those, half as fast, whatever else the CPU names among its instructions. `clocked`
    gives the seconds of a product of a type.
    """
    if device.type != "cpu":
        return True
    clocked = clocked or _seconds
    trials = [(clocked(torch.bfloat16), clocked(torch.float32)) for _ in range(_TRIALS)]
    return min(bf16 for bf16, _ in trials) < min(fp32 for _, fp32 in trials)


def _seconds(dtype: torch.dtype) -> float:
    x, weight = torch.ones(_ROWS, _INPUTS, dtype=dtype), torch.ones(_OUTPUTS, _INPUTS, dtype=dtype)
    began = time.perf_counter()
    torch.nn.functional.linear(x, weight)
    return time.perf_counter() - began
