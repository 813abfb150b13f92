"""The compiled twin of `kernels.quantised`: codes are packed once, in tiles that a product reads front to back."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kernels.cpu.library import address, function
from kernels.cpu.linear import PackedLinear, product_kernel
from kernels.linear import QuantisedWeight
from kernels.quantised import Blocks, Form


class _Part(ctypes.Structure):
    """`Part` of linear_quantised.cpp."""

    _fields_ = [
        ("tiles", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("outputs", "bits", "size", "zero", "has_minima")),
    ]


class _Matrix(ctypes.Structure):
    """`Matrix` of linear_quantised.cpp."""

    _fields_ = [("parts", ctypes.c_void_p), ("count", ctypes.c_int64)]


class _Packed(NamedTuple):
    """A part, and the memory that it points to."""

    part: _Part
    tiles: Tensor  # uint8


class PackedWeight(QuantisedWeight):
    """Codes in as many bits as they have."""

    def __init__(self, packed: Sequence[_Packed], columns: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.shape = sum(part.outputs for part, _ in packed), columns
        self._packed = packed
        self._parts = (_Part * len(packed))(*(part for part, _ in packed))
        self._matrix = _Matrix(ctypes.addressof(self._parts), len(packed))

    @classmethod
    def joined(cls, weights: Sequence[Self]) -> Self:
        return cls([packed for weight in weights for packed in weight._packed], weights[0].shape[1], weights[0].dtype)

    @property
    def num_bytes(self) -> int:
        return sum(tiles.nbytes for _, tiles in self._packed)

    def lookup(self, outputs: Tensor) -> Tensor:
        assert len(self._packed) == 1, "a joined matrix is not looked up"
        part, _ = self._packed[0]
        wanted, columns = outputs.contiguous(), self.shape[1]
        y = torch.empty(*outputs.shape, columns, dtype=self.dtype)
        call = function("lookup_quantised", "ppnnpi", self.dtype)
        call(ctypes.addressof(part), address(wanted), wanted.numel(), columns, address(y), torch.get_num_threads())
        return y

    def plan(self, bias: Tensor | None) -> PackedLinear:
        out, columns = self.shape
        kernel = product_kernel("linear_quantised", self.dtype)
        return PackedLinear(kernel, ctypes.addressof(self._matrix), (columns, out), bias, self)


def keep_blocks(form: Form, shape: tuple[int, int], dtype: torch.dtype, pieces: Iterable[Blocks]) -> PackedWeight:
    """As the reference."""
    out, columns = shape
    part = _Part(None, out, form.bits, form.size, form.zero, form.has_minima)
    where = ctypes.addressof(part)
    num_bytes = function("quantised_bytes", "pn")
    num_bytes.restype = ctypes.c_int64
    tiles = torch.zeros(num_bytes(where, columns), dtype=torch.uint8)
    part.tiles = tiles.data_ptr()
    pack, first = function("pack_quantised", "ppnnnpppi"), 0
    for piece in pieces:
        codes, scales, minima = (None if value is None else value.contiguous() for value in piece)
        assert codes is not None
        rows, given = codes.shape[0], (address(codes), address(scales), address(minima))
        pack(where, tiles.data_ptr(), columns, first, rows, *given, torch.get_num_threads())
        first += rows
    assert first == out, f"{first} rows of {out}"
    return PackedWeight([_Packed(part, tiles)], columns, dtype)
