"""Quantised tensors of GGUF files in the kernels' blocks, or dequantised.

A quantised matrix is stored as [rows, blocks, bytes], in formats defined by ggml (ggml-common.h, ggml-quants.c). If
blocks are kept, matrices in a format without a kernel are quantised anew to 8 bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from torch import Tensor

from kernels import ops
from kernels.layers import (
    COLUMNS,
    EIGHT_BITS,
    MXFP4,
    SPAN,
    BlockFormat,
    QuantisedBlocks,
    QuantisedWeight,
    groups_of,
    in_8_bits,
)
from service.engine.gguf_reader import GGUFTensor

_PIECE = 1 << 23  # number of weights that are converted at once
PLAIN = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F64}
"""Types of tensors that are not quantised."""


def dense(tensor: GGUFTensor, dtype: torch.dtype) -> Tensor:
    """Dequantise a tensor piece by piece. # -> [*shape]"""
    if len(tensor.shape) < 2:
        return numbers(tensor).to(dtype)
    dense, first = torch.empty(tensor.shape, dtype=dtype), 0
    for piece in _pieces(tensor.data, tensor.shape[1]):
        dense[first : first + len(piece)] = torch.from_numpy(np.array(dequantize(piece, tensor.kind)))
        first += len(piece)
    return dense if tensor.columns is None else dense[:, torch.from_numpy(tensor.columns)]


def numbers(tensor: GGUFTensor) -> Tensor:
    """Dequantise a small tensor. # -> [*shape] float32"""
    return torch.from_numpy(dequantize(tensor.data, tensor.kind).astype(np.float32))


def kept(
    data: NDArray[Any], kind: GGMLQuantizationType, dtype: torch.dtype, order: NDArray[np.int64] | None = None
) -> tuple[QuantisedWeight, str]:
    """Convert a quantised matrix to the kernels' block format. Returns it, and the name of the format. `order`: places
    of the columns in `data`, blocks of 32 together, if these are in another order. # data [out, bytes], order [in]"""
    columns, size = GGML_QUANT_SIZES[kind]
    shape = data.shape[0], data.shape[1] // size * columns
    keep = ops.on(torch.device("cpu")).keep_blocks
    if kind not in FORMATS:
        pieces = (in_8_bits(torch.from_numpy(dequantize(piece, kind))) for piece in _pieces(data, shape[1]))
        return keep(EIGHT_BITS, shape, dtype, _sorted(pieces, order)), f"{kind.name} in 8 bits"
    form, unpack = FORMATS[kind]
    own = form if order is None else form._replace(has_units=False)
    by_block = (torch.from_numpy(piece.copy()).unflatten(1, (-1, size)) for piece in _pieces(data, shape[1]))
    return keep(own, shape, dtype, _sorted((unpack(block, form) for block in by_block), order)), kind.name


def unit_of(kind: GGMLQuantizationType, *, in_blocks: bool) -> int:
    """Number of columns of a tensor of this type that cannot be parted once it is loaded."""
    return SPAN if in_blocks and kind in FORMATS and FORMATS[kind][0].has_units else COLUMNS


def part_of(tensor: GGUFTensor, dim: int, ranges: Sequence[slice]) -> GGUFTensor:
    """Take ranges of rows (`dim` 0) or a range of columns. Raises ValueError for columns that part a block."""
    if dim == 0:
        data = tensor.data[ranges[0]] if len(ranges) == 1 else np.concatenate([tensor.data[own] for own in ranges])
        return tensor._replace(shape=(len(data), *tensor.shape[1:]), data=data)
    (own,) = ranges
    columns = GGML_QUANT_SIZES[tensor.kind][0]
    size = tensor.data.shape[1] * columns // tensor.shape[1]
    if own.start % columns or own.stop % columns:
        raise ValueError(f"columns {own.start} to {own.stop} part blocks of {columns}: use fewer devices")
    data = tensor.data[:, own.start // columns * size : own.stop // columns * size]
    return tensor._replace(shape=(tensor.shape[0], own.stop - own.start), data=data)


def _sorted(pieces: Iterator[QuantisedBlocks], order: NDArray[np.int64] | None) -> Iterator[QuantisedBlocks]:
    """Sort the columns of blocks; they lose their units, of which neighbours would have several. Raises ValueError if
    that parts a block."""
    if order is None:
        return pieces
    blocks = groups_of(torch.from_numpy(order), len(order))
    factors = ((piece.codes, piece.factors().half()) for piece in pieces)
    return (QuantisedBlocks(codes[:, blocks], *of[:, :, blocks]) for codes, of in factors)


def _pieces(data: NDArray[Any], columns: int) -> Iterator[NDArray[Any]]:
    rows = max(COLUMNS, _PIECE // columns // COLUMNS * COLUMNS)
    for first in range(0, data.shape[0], rows):
        yield np.ascontiguousarray(data[first : first + rows])


def _halves(raw: Tensor) -> Tensor:
    """Reinterpret bytes as float16. # [..., 2 n] uint8 -> [..., n] float16"""
    return raw.contiguous().view(torch.float16)


def _bits(raw: Tensor, *shifts: int, mask: int) -> Tensor:
    """Shift all bytes right by each of `shifts`, mask them, and concatenate the results.
    # [..., n] -> [..., shifts * n]"""
    return torch.cat([raw >> shift & mask for shift in shifts], dim=-1)


def _of_32(raw: Tensor, form: BlockFormat) -> QuantisedBlocks:
    """Unpack Q4_0, Q4_1, Q5_0 and Q5_1. A block holds scale, minimum, fifth bits, and codes, with four bits of columns
    j and j + 16 in byte j. # [rows, blocks, bytes]"""
    halves = 2 * (1 + form.has_minima)
    head, rest = _halves(raw[..., :halves]), raw[..., halves:]
    codes = _bits(rest[..., -16:], 0, 4, mask=15)
    if form.bits > 4:  # bit i of 32 is the fifth bit of column i
        spread = rest[..., :4, None] >> torch.arange(8, dtype=torch.uint8) & 1
        codes = codes | spread.flatten(-2) << 4
    return QuantisedBlocks(codes, head[..., :1], head[..., 1:] if form.has_minima else None)


def _q8_0(raw: Tensor, form: BlockFormat) -> QuantisedBlocks:
    """Unpack Q8_0. A block holds a scale, and codes as signed bytes. # [rows, blocks, bytes]"""
    return QuantisedBlocks(raw[..., 2:] ^ 128, _halves(raw[..., :2]))


def _of_k(raw: Tensor, form: BlockFormat) -> QuantisedBlocks:
    """Unpack Q4_K and Q5_K. A block holds its scale and minimum, eight 6-bit scales and minima, fifth bits, and codes
    in groups of 64 columns. # [rows, blocks, bytes]"""
    heads, packed, rest = _halves(raw[..., :4]), raw[..., 4:16], raw[..., 16:]
    first, second, third = packed.split(4, dim=-1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    codes = _bits(rest[..., -128:].unflatten(-1, (4, 32)), 0, 4, mask=15).flatten(-2)  # [rows, blocks, 256]
    if form.bits > 4:
        codes = codes | _bits(rest[..., :32], *range(8), mask=1) << 4
    scales, minima = (value.view(torch.int8).reshape(len(raw), -1, 1) for value in (scales, minima))
    units = heads * torch.tensor([1, -1], dtype=torch.float16)  # minima are subtracted
    return QuantisedBlocks(codes.view(len(raw), -1, COLUMNS), scales, minima, units)


def _q6_k(raw: Tensor, form: BlockFormat) -> QuantisedBlocks:
    """Unpack Q6_K. A block holds the lower four bits and the upper two bits of codes in groups of 128 columns, 16
    scales, and its own scale. # [rows, blocks, bytes]"""
    low, high = raw[..., :128].unflatten(-1, (2, 64)), raw[..., 128:192].unflatten(-1, (2, 32))
    codes = _bits(low, 0, 4, mask=15) | _bits(high, 0, 2, 4, 6, mask=3) << 4
    scales, rows = raw[..., 192:208].view(torch.int8), len(raw)
    return QuantisedBlocks(codes.view(rows, -1, COLUMNS), scales.reshape(rows, -1, 2), units=_halves(raw[..., 208:]))


def mxfp4_blocks(codes: Tensor, exponents: Tensor) -> QuantisedBlocks:
    """Blocks in the format `MXFP4` of the OCP Microscaling specification: floats of 4 bits (E2M1) times 2^(exponent -
    127). Raises ValueError if half of a scale, the unit of the table, is no float16.
    # codes [rows, blocks, 32] uint8, exponents [rows, blocks] uint8"""
    units = exponents.int() - 128
    used = units[(codes & 7 > 0).any(-1)]  # a block of zeros has any scale
    if ((used < -24) | (used > 15)).any():
        raise ValueError("MXFP4 scales are not between 2^-23 and 2^16")
    return QuantisedBlocks(codes, torch.exp2(units.clamp(-24, 15).double()).half()[..., None])


def _mxfp4(raw: Tensor, form: BlockFormat) -> QuantisedBlocks:
    """Unpack MXFP4. A block holds an exponent, and codes with those of columns j and j + 16 in byte j.
    # [rows, blocks, bytes]"""
    return mxfp4_blocks(_bits(raw[..., 1:], 0, 4, mask=15), raw[..., 0])


FORMATS: Mapping[GGMLQuantizationType, tuple[BlockFormat, Callable[[Tensor, BlockFormat], QuantisedBlocks]]] = {
    GGMLQuantizationType.Q4_0: (BlockFormat(4, 8), _of_32),
    GGMLQuantizationType.Q4_1: (BlockFormat(4, 0, has_minima=True), _of_32),
    GGMLQuantizationType.Q5_0: (BlockFormat(6, 16), _of_32),
    GGMLQuantizationType.Q5_1: (BlockFormat(6, 0, has_minima=True), _of_32),
    GGMLQuantizationType.Q8_0: (EIGHT_BITS, _q8_0),
    GGMLQuantizationType.Q4_K: (BlockFormat(4, 0, has_minima=True, has_units=True), _of_k),
    GGMLQuantizationType.Q5_K: (BlockFormat(6, 0, has_minima=True, has_units=True), _of_k),
    GGMLQuantizationType.Q6_K: (BlockFormat(6, 32, size=16, has_units=True), _q6_k),
    GGMLQuantizationType.MXFP4: (MXFP4, _mxfp4),
}
"""File formats whose blocks can be kept, with the kernels' block format and the function that unpacks the bytes."""
