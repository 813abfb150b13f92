"""The compiled twins of `kernels.linear` and `kernels.linear_int8`: weights are packed once, in tiles of outputs that a
product reads front to back."""

from ctypes import c_int64, c_void_p, cast

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.library import address, function

_OUTPUTS = 32  # of the largest tile that a build has; smaller ones divide it


class PackedLinear:
    """A product with one layer's packed weights."""

    def __init__(self, kernel: str, packed: Tensor, weight: Tensor, bias: Tensor | None, missing: int = 0) -> None:
        """`missing` columns of zeros stand behind those of the weight. # weight [out, in]"""
        self._call, self._packed, self.missing = function(kernel, "ppppnnni", weight.dtype), packed, missing
        self._out, self._width = weight.shape[0], weight.shape[1] + missing
        self._bias = None if bias is None else functional.pad(bias.detach().float(), (0, -self._out % _OUTPUTS))
        self._weights = address(packed), address(self._bias)
        self._sizes = self._width, self._out

    @property
    def parts(self) -> tuple[int | None, int | None, int | None, int, int]:
        """`Product` of decoder_layers.cpp: function, weights, bias, columns in and out."""
        return cast(self._call, c_void_p).value, *self._weights, *self._sizes

    def __call__(self, x: Tensor) -> Tensor:
        x = functional.pad(x, (0, self.missing)) if self.missing else x.contiguous()
        y = x.new_empty(*x.shape[:-1], self._out)
        rows = x.numel() // self._width
        self._call(x.data_ptr(), *self._weights, y.data_ptr(), rows, *self._sizes, torch.get_num_threads())
        return y


def plan_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """As the reference; rows of any number have the bits they have alone."""
    missing = weight.shape[1] % 2  # columns are taken in pairs
    whole = functional.pad(weight.detach(), (0, missing)).contiguous()
    out, width = whole.shape
    packed = whole.new_empty(-(-out // _OUTPUTS) * _OUTPUTS * width)
    function("pack", "ppnn", weight.dtype)(address(whole), address(packed), width, out)
    return PackedLinear("linear", packed, weight, bias, missing)


def plan_linear_int8(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """As the reference; rows of any number have the bits they have alone."""
    whole, sizes = weight.detach().contiguous(), (weight.shape[1], weight.shape[0])
    num_bytes = function("packed_int8_bytes", "nn")
    num_bytes.restype = c_int64
    packed = torch.empty(num_bytes(*sizes), dtype=torch.uint8)
    function("pack_int8", "ppnn", weight.dtype)(address(whole), address(packed), *sizes)
    return PackedLinear("linear_int8", packed, weight, bias)
