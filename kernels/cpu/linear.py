"""The compiled twin of `kernels.linear`: weights are packed once, in blocks that a product reads front to back."""

from ctypes import c_int, c_int64

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.library import address, function

_COLUMNS = 32  # outputs of a block, as in linear.cpp


class PackedLinear:
    """A product with one layer's packed weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._missing = weight.shape[1] % 2  # columns are taken in pairs
        whole = functional.pad(weight.detach(), (0, self._missing)).contiguous()
        self._out, self._width = whole.shape
        self._sizes = c_int64(self._width), c_int64(self._out)
        self._blocks = whole.new_empty(-(-self._out // _COLUMNS) * _COLUMNS * self._width)
        function("pack", weight.dtype)(address(whole), address(self._blocks), *self._sizes)
        self._bias = None if bias is None else functional.pad(bias.detach().float(), (0, -self._out % _COLUMNS))
        self._call = function("linear", weight.dtype)
        self._weights = address(self._blocks), address(self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        x = functional.pad(x, (0, self._missing)) if self._missing else x.contiguous()
        y = x.new_empty(*x.shape[:-1], self._out)
        rows = c_int64(x.numel() // self._width)
        self._call(address(x), *self._weights, address(y), rows, *self._sizes, c_int(torch.get_num_threads()))
        return y


def plan_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """As the reference; rows of any number have the bits they have alone."""
    return PackedLinear(weight, bias)
