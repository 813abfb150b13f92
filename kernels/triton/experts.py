# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""The feed-forward of `kernels.experts` in three launches: products before the gate, products after it, and the sum.

A program computes some outputs of one expert for a tile of its rows. How many tiles an expert has is known on the
device alone, so that there are as many programs as there may be tiles; a program without rows ends at once. Experts of
other devices have no tiles. As in `kernels.triton.layers`, a row's sums have one order in any tile."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts import Experts, QuantisedStack, StackedWeight
from kernels.layers import GateForm
from kernels.pieces import NUM_PIECES, Pieces, pieces_of
from kernels.triton.layers import Tile, gated, tiled

_FEW, _MANY = Tile(16, 64, 64, 4, 4, fewest=0), Tile(64, 64, 64, 4, 4, fewest=0)
"""Tiles by an expert's rows, of the same instructions and for the smallest device's memory. `features` is the number of
outputs; of gate and of up projections, each."""
_FLOAT32 = Tile(16, 32, 32, 4, 2, fewest=0)
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class _GroupedExperts:
    """Planned experts with dense weights."""

    gate_up: Tensor  # [experts, 2 * width, in]
    down: Tensor  # [experts, out, width]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    gate: GateForm
    pieces: Pieces
    piece_of: Tensor  # piece of each expert, [experts] int64

    def __call__(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Run the chosen experts. # x [rows, in]; indices, weights [rows, chosen], ascending -> [rows, out]"""
        (rows, chosen), (experts, out, width) = indices.shape, self.down.shape
        y = x.new_empty(rows, out, dtype=x.dtype if self.pieces.whole else torch.float32)
        if not rows:
            return y
        own = rows * chosen * len(self.pieces.spans) // NUM_PIECES  # pairs of experts that are here, about
        tile, flat = _tile_for(x.dtype, own, experts), indices.flatten()
        tiles = tiled(flat, experts, tile.rows) if self.pieces.whole else _own_tiles(flat, experts, tile.rows)
        pairs = _Pairs(flat, tiles, tile, chosen)
        hidden, parts = x.new_empty(rows * chosen, width), x.new_empty(rows * chosen, out)
        _multiply(x.contiguous(), self.gate_up, self.gate_up_bias, hidden, pairs, self.gate)
        _multiply(hidden, self.down, self.down_bias, parts, pairs, None)
        _add_chosen[(rows, triton.cdiv(out, _BLOCK))](
            parts, weights.contiguous(), flat, self.piece_of, y, out, experts,
            CHOSEN=chosen, BLOCK=_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
        return y


def plan_experts(
    gate_up: StackedWeight,
    down: StackedWeight,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate: GateForm,
    pieces: Pieces | None = None,
) -> Experts:
    """Same as the reference op; quantised weights are dequantised. # gate_up [experts, 2 * width, in], down [experts,
    out, width], gate_up_bias [experts, 2 * width], down_bias [experts, out]"""
    up, last = (stack.dense() if isinstance(stack, QuantisedStack) else stack.contiguous() for stack in (gate_up, down))
    up_bias, last_bias = (None if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias))
    cut = pieces or pieces_of(len(up), 1)
    piece_of = torch.repeat_interleave(torch.tensor(cut.ends, device=up.device).diff())
    return _GroupedExperts(up, last, up_bias, last_bias, gate, cut, piece_of)


def _own_tiles(indices: Tensor, experts: int, rows: int) -> Tensor:
    """Tiles of the pairs whose experts are here. # indices [pairs] -> [tiles, rows]"""
    groups = torch.where((indices >= 0) & (indices < experts), indices, experts)
    tiles = tiled(groups, experts + 1, rows)
    return torch.where(groups[tiles] < experts, tiles, -1)


def _tile_for(dtype: torch.dtype, pairs: int, experts: int) -> Tile:
    """Choose the tile by the mean number of an expert's rows."""
    if dtype == torch.float32:
        return _FLOAT32
    return _MANY if pairs >= _MANY.rows // 2 * experts else _FEW


class _Pairs(NamedTuple):
    """Pairs of a row and one of its experts, in tiles of one expert each."""

    experts: Tensor  # [pairs]
    tiles: Tensor  # [tiles, rows of a tile], numbers of pairs, -1 padded
    tile: Tile
    chosen: int


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, pairs: _Pairs, gate: GateForm | None
) -> None:
    """Compute the products of all pairs. With a gate x has one line for each row, else for each pair."""
    columns, width, tile = weight.shape[2], out.shape[1], pairs.tile
    _grouped[len(pairs.tiles), triton.cdiv(width, tile.features)](
        x, weight, weight if bias is None else bias, out, pairs.experts, pairs.tiles, width, columns,
        CHOSEN=pairs.chosen, ACTIVATION=None if gate is None else gate.activation,
        LIMIT=0.0 if gate is None else gate.limit, HAS_BIAS=bias is not None, EVEN=columns % tile.columns == 0,
        ROWS=tile.rows, FEATURES=tile.features, COLUMNS=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _grouped(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    experts: tl.tensor,
    tiles: tl.tensor,
    width: tl.tensor,
    columns: tl.tensor,
    CHOSEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute one tile of the output: with an activation, of gated products."""
    gated_too: tl.constexpr = ACTIVATION is not None
    pair = tl.load(tiles + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    last = tl.max(pair, 0)
    expert = tl.load(experts + tl.maximum(last, 0))
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    is_row, is_feature = pair >= 0, feature < tl.where(last >= 0, width, 0)
    source = pair // CHOSEN if gated_too else pair
    outputs = width * (2 if gated_too else 1)
    lines = weight + (expert * outputs + feature)[:, None] * columns
    others = x + source[None, :] * columns
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    up = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in range(0, tl.where(last >= 0, columns, 0), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        left_held, right_held = is_feature[:, None], is_row[None, :]
        if not EVEN:
            left_held, right_held = left_held & (column < columns)[None, :], right_held & (column < columns)[:, None]
        right = tl.load(others + column[:, None], mask=right_held, other=0.0)
        left = tl.load(lines + column[None, :], mask=left_held, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        if gated_too:
            left = tl.load(lines + width * columns + column[None, :], mask=left_held, other=0.0)
            up = tl.dot(left, right, up, input_precision="ieee")
    if HAS_BIAS:
        biases = bias + expert * outputs + feature
        total += tl.load(biases, mask=is_feature, other=0.0).to(tl.float32)[:, None]
        if gated_too:
            up += tl.load(biases + width, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    if gated_too:
        kind: tl.constexpr = out.dtype.element_ty
        total = gated(total.to(kind).to(tl.float32), up.to(kind).to(tl.float32), ACTIVATION, LIMIT, kind)
    tl.store(out + pair[None, :] * width + feature[:, None], total, mask=is_feature[:, None] & is_row[None, :])


@triton.jit
def _add_chosen(
    parts: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    piece_of: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    number: tl.tensor,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add up a row's results in the order of its experts: within a piece, then within a pair, a half and the whole of
    the pieces, each when the next expert is in another one. # parts [rows, chosen, width]"""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    pair, half, whole, before = total, total, total, 0
    for one in tl.static_range(CHOSEN):
        at = row * CHOSEN + one
        expert = tl.load(experts + at)
        is_here = (expert >= 0) & (expert < number)
        held = place < tl.where(is_here, width, 0)
        value = tl.load(parts + at * width + place, mask=held, other=0.0).to(tl.float32)
        piece = tl.load(piece_of + expert, mask=is_here, other=before)
        pair, total = _carried(total, pair, piece != before)
        half, pair = _carried(pair, half, piece // 2 != before // 2)
        whole, half = _carried(half, whole, piece // 4 != before // 4)
        total += tl.where(is_here, value * tl.load(weights + at), 0.0)
        before = piece
    tl.store(out + row * width + place, whole + (half + (pair + total)), mask=place < width)


@triton.jit
def _carried(lower: tl.tensor, upper: tl.tensor, ends: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Add a sum that ends to that of the level above it, and start anew."""
    return tl.where(ends, upper + lower, upper), tl.where(ends, 0.0, lower)
