"""How the sum of a product is cut into pieces, so that it has the same bits on one device or on several.

A product over columns that several devices share is a sum of 8 pieces, added pairwise:

    y = round(((p_0 + p_1) + (p_2 + p_3)) + ((p_4 + p_5) + (p_6 + p_7)) + b),   p_i = sum of the columns of piece i

Of 2, 4 or 8 devices each adds up the pieces of its own columns, a whole subtree, in float32; then pairs of devices add
their sums, and pairs of pairs. One device computes the whole tree. Bias and rounding come last.

Pieces end where `unit` columns end: whole heads of attention, whole blocks of quantised weights. They are uneven where
the units do not divide by 8, and may be empty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:  # an import at run time would be circular
    from kernels.layers import Product, Weight

NUM_PIECES = 8


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a sum over columns."""

    ends: tuple[int, ...]  # first column of each piece, and the end of the last one
    whole: bool = True  # otherwise the sum is a part of a larger one: it stays in float32 and has no bias

    @property
    def spans(self) -> tuple[slice, ...]:
        """Columns of each piece."""
        return tuple(map(slice, self.ends, self.ends[1:]))


def pieces_of(columns: int, unit: int) -> Pieces:
    """Cut so many columns into pieces of whole units; the last unit may have fewer columns."""
    units = -(-columns // unit)
    return Pieces(tuple(min(columns, unit * (units * piece // NUM_PIECES)) for piece in range(NUM_PIECES + 1)))


def added(sums: Sequence[Tensor]) -> Tensor:
    """Add neighbours until one sum is left. # 1, 2, 4 or 8 tensors of one shape -> like each"""
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def finished(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add the bias, and round. # total [..., out] float32, bias [out] -> [..., out]"""
    return (total if bias is None else total + bias.float()).to(dtype)


def multiply(x: Tensor, *, weight: Tensor, bias: Tensor | None, pieces: Pieces) -> Tensor:
    """Compute x W^T + b by pieces. # x [..., in], weight [out, in], bias [out] -> [..., out]"""
    total = added([functional.linear(x[..., own].float(), weight[:, own].float()) for own in pieces.spans])
    return finished(total, bias, x.dtype) if pieces.whole else total


class TensorShard(NamedTuple):
    """The part of a model that one of several devices has: the pieces of a whole subtree."""

    rank: int = 0
    size: int = 1  # 1, 2, 4 or 8 devices

    def span(self, pieces: Pieces) -> slice:
        """The device's own columns."""
        ends = self._ends(pieces)
        return slice(ends[0], ends[-1])

    def part(self, pieces: Pieces) -> Pieces:
        """The device's own pieces, as a part of the sum over its own columns."""
        first, *ends = self._ends(pieces)
        return Pieces((0, *(end - first for end in ends)), whole=False)

    def _ends(self, pieces: Pieces) -> tuple[int, ...]:
        each = NUM_PIECES // self.size
        return pieces.ends[self.rank * each : (self.rank + 1) * each + 1]


class Devices(Protocol):
    """The devices that share a model, as the one that runs this code sees them. All call these in the same order."""

    shard: TensorShard

    def total(self, number: int) -> int:
        """Add up a number of each device."""

    def added(self, sums: Tensor) -> Tensor:
        """Add up the sums of all devices, by the tree of the module. # [rows, out] float32 -> like sums"""


def plan_shared(
    plan: "Callable[[Weight, Tensor | None, Pieces], Product]",
    weight: "Weight",
    bias: Tensor | None,
    unit: int,
    of: Devices,
) -> "Product":
    """Plan a product whose columns several devices share. `plan`: op that plans the product of the device's own
    columns. Raises ValueError if these are not the columns of its pieces. # weight [out, own columns], bias [out]"""
    pieces = pieces_of(of.total(weight.shape[1]), unit)
    own = of.shard.part(pieces)
    if own.ends[-1] != weight.shape[1] or not weight.shape[1]:
        raise ValueError(f"{weight.shape[1]} columns of {pieces.ends[-1]} are not those of device {of.shard.rank}")
    product = plan(weight, None, own)
    return lambda x: finished(of.added(product(x)), bias, x.dtype)
