"""Weights in blocks of 4, 6 or 8 bits, as GGUF files have them, and products with them.

    w_oi = scale_oB (code_oi - zero) + minimum_oB,   x_i ~ a_B p_i
    y_o = b_o + sum_B scale_oB a_B (sum_{i in B} (code_oi - zero) p_i) + minimum_oB a_B (sum_{i in B} p_i)

B is a block of 32 columns, or half of one, a_B = max |x_i| / 127 over 32 columns and p_i = round(x_i / a_B):
activations are quantised row by row as llama.cpp does. The sums within a block are whole numbers and exact, and blocks
are added up in the order of their columns, so a row has the same bits alone and among any others.

Legend: out, in = widths of the layer, blocks = ceil(in / 32), size = columns that share a scale.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear import Product, QuantisedWeight

COLUMNS = 32
"""Of a block."""

_MOST = 127
_LARGEST_SCALE = torch.finfo(torch.float16).max


class Form(NamedTuple):
    """How a matrix is kept."""

    bits: int  # of a code: 4, 6 or 8
    zero: int  # the code of weight 0 where there are no minima
    has_minima: bool = False
    size: int = COLUMNS  # or 16, with 6 bits and no minima


EIGHT_BITS = Form(8, 128)


class Blocks(NamedTuple):
    """Some rows of a matrix."""

    codes: Tensor  # [rows, blocks, 32] uint8
    scales: Tensor  # [rows, blocks, 32 / size] float16
    minima: Tensor | None = None  # as scales

    def weights(self, form: Form) -> Tensor:
        """# -> [rows, blocks, 32 / size, size] float32"""
        codes: Tensor = (self.codes.float() - form.zero).unflatten(2, (-1, form.size))
        steps = codes * self.scales.float()[..., None]
        return steps if self.minima is None else steps + self.minima.float()[..., None]


class UnpackedWeight(QuantisedWeight):
    """One byte for each code."""

    def __init__(self, parts: Sequence[tuple[Form, Blocks]], columns: int, dtype: torch.dtype) -> None:
        self._parts, self.dtype = parts, dtype
        self.shape = sum(blocks.codes.shape[0] for _, blocks in parts), columns

    @classmethod
    def joined(cls, weights: Sequence[Self]) -> Self:
        return cls([part for weight in weights for part in weight._parts], weights[0].shape[1], weights[0].dtype)

    @property
    def num_bytes(self) -> int:
        return sum(value.nbytes for _, blocks in self._parts for value in blocks if value is not None)

    def lookup(self, outputs: Tensor) -> Tensor:
        whole = torch.cat([blocks.weights(form).flatten(1) for form, blocks in self._parts])[:, : self.shape[1]]
        return whole.to(self.dtype)[outputs]

    def plan(self, bias: Tensor | None) -> Product:
        return partial(_product, parts=self._parts, bias=bias)


def keep_blocks(form: Form, shape: tuple[int, int], dtype: torch.dtype, pieces: Iterable[Blocks]) -> QuantisedWeight:
    """A matrix of its rows, piece by piece: each but the last has a multiple of 32 rows."""
    codes, scales, minima = zip(*pieces, strict=True)
    blocks = Blocks(torch.cat(codes), torch.cat(scales), torch.cat(minima) if form.has_minima else None)
    return UnpackedWeight([(form, blocks)], shape[1], dtype)


def in_8_bits(weight: Tensor) -> Blocks:
    """Whole numbers from -127 to 127 with one scale for 32 columns, of form `EIGHT_BITS`. # weight [out, in]"""
    blocks = _blocks(weight.float())
    scales = (blocks.abs().amax(-1, keepdim=True) / _MOST).clamp(max=_LARGEST_SCALE).half()
    counts = torch.where(scales > 0, (blocks / scales.float()).round().clamp(-_MOST, _MOST), 0.0)
    return Blocks((counts + EIGHT_BITS.zero).to(torch.uint8), scales)


def _product(x: Tensor, parts: Sequence[tuple[Form, Blocks]], bias: Tensor | None) -> Tensor:
    """# x [..., in] -> [..., out]"""
    most = (activations := _blocks(x.float())).abs().amax(-1, keepdim=True)  # [..., blocks, 1]
    inverse = torch.where(most > 0, torch.full_like(most, _MOST) / most, 0.0)
    whole = (activations.double() * inverse.double()).round().float()  # the product is exact before it is rounded
    y = torch.cat([_part_of_product(whole, most / _MOST, *part) for part in parts], dim=-1)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _part_of_product(whole: Tensor, scales: Tensor, form: Form, weight: Blocks) -> Tensor:
    """# whole [..., blocks, 32], scales [..., blocks, 1] -> [..., out]"""
    whole = whole.unflatten(-1, (-1, form.size))  # [..., blocks, scales, size]
    codes = (weight.codes.float() - form.zero).unflatten(2, (-1, form.size))
    dots = torch.einsum("...bsi,obsi->...obs", whole, codes)  # whole numbers below 2^24: exact
    y = dots * weight.scales.float() * scales[..., None, :, :]
    if weight.minima is not None:
        y = y + weight.minima.float() * (scales * whole.sum(-1))[..., None, :, :]
    return y.flatten(-2).sum(-1)


def _blocks(x: Tensor) -> Tensor:
    """# [..., columns] -> [..., blocks, 32], the last one filled up with zeros"""
    whole: Tensor = functional.pad(x, (0, -x.shape[-1] % COLUMNS)).unflatten(-1, (-1, COLUMNS))
    return whole
