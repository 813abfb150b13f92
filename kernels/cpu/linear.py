"""The compiled twin of `kernels.linear`: weights are packed once, in tiles of outputs that a product reads front to
back."""

from ctypes import c_void_p, cast
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.library import address, function
from kernels.linear import Product, QuantisedWeight, Weight

_OUTPUTS = 32  # of the largest tile that a build has; smaller ones divide it


class PackedLinear:
    """A product with one layer's packed weights."""

    def __init__(
        self, call: Any, packed: int, sizes: tuple[int, int], bias: Tensor | None, kept: object, missing: int = 0
    ) -> None:
        """`call`: the kernel; `packed`: address of the weights, which `kept` holds; sizes: columns in and out, of which
        `missing` zeros are none of the layer's."""
        self._call, self._kept, self._sizes, self.missing = call, kept, sizes, missing
        self._bias = None if bias is None else functional.pad(bias.detach().float(), (0, -sizes[1] % _OUTPUTS))
        self._weights = packed, address(self._bias)

    @property
    def parts(self) -> tuple[int | None, int | None, int | None, int, int]:
        """`Product` of decoder_layers.cpp: function, weights, bias, columns in and out."""
        return cast(self._call, c_void_p).value, *self._weights, *self._sizes

    def __call__(self, x: Tensor) -> Tensor:
        x = functional.pad(x, (0, self.missing)) if self.missing else x.contiguous()
        width, out = self._sizes
        y = x.new_empty(*x.shape[:-1], out)
        self._call(
            x.data_ptr(), *self._weights, y.data_ptr(), x.numel() // width, *self._sizes, torch.get_num_threads()
        )
        return y


def product_kernel(name: str, dtype: torch.dtype) -> Any:
    """The C function of a product with weights of that kind, for activations of that type."""
    return function(name, "ppppnnni", dtype)


def plan_linear(weight: Weight, bias: Tensor | None) -> Product:
    """As the reference; rows of any number have the bits they have alone."""
    if isinstance(weight, QuantisedWeight):
        return weight.plan(bias)
    missing = weight.shape[1] % 2  # columns are taken in pairs
    whole = functional.pad(weight.detach(), (0, missing)).contiguous()
    out, width = whole.shape
    packed = whole.new_empty(-(-out // _OUTPUTS) * _OUTPUTS * width)
    function("pack", "ppnn", weight.dtype)(address(whole), address(packed), width, out)
    kernel = product_kernel("linear", weight.dtype)
    return PackedLinear(kernel, packed.data_ptr(), (width, out), bias, packed, missing)
