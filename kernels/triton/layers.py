# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""Ops of `kernels/layers.py` in one launch each, but for parts of sums.

A product sums every row as one chain of multiply-adds in the order of its columns, in float32, in any tile. Where
several devices share the columns, each piece of `kernels.pieces` is such a chain, and they are added up afterwards.
With few rows, reading the weights bounds the time; programs stream them through several pipeline stages, which keeps
enough bytes in flight without splitting the columns further (split-K). Weights are the left factor of the products, so
that tiles of few and of many rows use the same instructions.

One program norms a row, and one rotates a head of a row, so that sums do not depend on the batch. Values that the
references round are rounded here, and the products of the rotation are not fused with their sum, so that the result has
the reference's bits."""

from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layers import GateForm, Heads, Product, RotaryRows, Weight, dense, spans_projection
from kernels.pieces import Pieces, added


@dataclass(frozen=True, slots=True)
class Tile:
    """The share of the output that a program computes, and its schedule."""

    rows: int
    features: int
    columns: int  # columns that are summed at a time
    warps: int
    stages: int  # most pipeline stages; a device with less shared memory uses fewer, which changes no bit
    fewest: int  # number of programs below which a smaller tile is faster

    def stage_bytes(self, item: int) -> int:
        """Shared memory of one stage in bytes, for elements of `item` bytes."""
        return (self.rows + self.features) * self.columns * item


_TILES = (
    Tile(256, 128, 64, 8, 3, fewest=256),
    Tile(128, 128, 64, 8, 4, fewest=96),
    Tile(128, 64, 64, 4, 6, fewest=96),
    Tile(64, 64, 128, 4, 4, fewest=96),
    Tile(32, 64, 128, 4, 6, fewest=0),
    Tile(16, 64, 128, 4, 6, fewest=0),
)
"""Tiles, largest first: larger ones compute more per byte read, but a device needs about a hundred programs to be busy.
Chosen by timing on an H100, with the layers of an 8B model and 1 to 2048 rows (docs/gpu.md)."""

_SMALLEST_SHARED = 99 * 1024

_FLOAT32 = Tile(16, 64, 32, 4, 2, fewest=0)
"""Tile of products in full precision, which use no matrix instructions and must fit into registers."""


def plan_linear(weight: Weight, bias: Tensor | None, pieces: Pieces | None = None) -> Product:
    """Same as the reference op, but a whole sum is one chain of all columns, which several devices do not compute;
    quantised weights are dequantised. # weight [out, in], bias [out]"""
    weight = dense(weight).contiguous()
    features, columns = weight.shape
    ends, unit = None, columns
    if pieces is not None and not pieces.whole:
        bias, unit = None, gcd(*pieces.ends)
        ends = torch.tensor(pieces.ends, dtype=torch.int32, device=weight.device) // unit

    def product(x: Tensor) -> Tensor:
        lines = x.reshape(-1, columns).contiguous()
        count, dtype = (1, x.dtype) if ends is None else (len(ends) - 1, torch.float32)
        out = x.new_empty(count, lines.shape[0], features, dtype=dtype)
        if lines.shape[0]:
            _launch(lines, weight, bias, out, ends, unit)
        return added([*out]).view(*x.shape[:-1], features)

    return product


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, ends: Tensor | None, unit: int) -> None:
    """`unit`: of `ends` in columns. # ends [pieces + 1] int32, out [pieces, rows, features]"""
    (rows, columns), (pieces, _, features) = x.shape, out.shape
    tile = _FLOAT32 if x.dtype == torch.float32 else _tile_for(rows, features * pieces)
    _linear[triton.cdiv(rows, tile.rows), triton.cdiv(features, tile.features), pieces](
        x, weight, x if bias is None else bias, out, ends, None if ends is None else unit, rows, features, columns,
        HAS_BIAS=bias is not None, EVEN=unit % tile.columns == 0,
        ROWS=tile.rows, FEATURES=tile.features, COLUMNS=tile.columns, num_warps=tile.warps,
        num_stages=min(tile.stages, _shared_memory(x.device) // tile.stage_bytes(x.element_size())),
        enable_fp_fusion=True,
    )  # fmt: skip


def _tile_for(rows: int, features: int) -> Tile:
    """Choose the largest tile that the rows fill by more than half and that gives a device enough programs."""

    def fits(tile: Tile) -> bool:
        programs = triton.cdiv(rows, tile.rows) * triton.cdiv(features, tile.features)
        return 2 * rows > tile.rows and programs >= tile.fewest

    return next(filter(fits, _TILES), _TILES[-1])


def tiled(groups: Tensor, number: int, rows: int) -> Tensor:
    """Assign items to tiles of so many rows: each of `number` groups has its own tiles, which its items fill in order.
    # groups [items] int64 -> numbers of items [tiles, rows] int64, -1 padded"""
    order, items = groups.argsort(stable=True), len(groups)
    owner = groups[order]
    counts = groups.new_zeros(number).index_add_(0, groups, torch.ones_like(groups))
    rank = torch.arange(items, device=groups.device) - (counts.cumsum(0) - counts)[owner]
    tiles = (counts + rows - 1) // rows
    first_tile = tiles.cumsum(0) - tiles
    place = (first_tile[owner] + rank // rows) * rows + rank % rows
    most = (items + min(items, number) * (rows - 1)) // rows
    return groups.new_full((most * rows,), -1).scatter_(0, place, order).view(most, rows)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can use; without a device, the smallest value of supported devices."""
    if device.type != "cuda":
        return _SMALLEST_SHARED
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(properties["max_shared_mem"])


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    ends: tl.tensor,
    unit: tl.tensor,
    rows: tl.tensor,
    features: tl.tensor,
    columns: tl.tensor,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute one tile of the output, or of the sum of one piece. Programs of the same weights run next to each other,
    so that they share reads."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    is_row, is_feature = row < rows, feature < features
    lines = weight + feature.to(tl.int64)[:, None] * columns
    others = x + row.to(tl.int64)[None, :] * columns
    first, end = 0, columns
    if ends is not None:
        piece = tl.program_id(2)
        first, end = tl.load(ends + piece) * unit, tl.load(ends + piece + 1) * unit
        out += piece.to(tl.int64) * rows * features
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in range(first, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        left_held, right_held = is_feature[:, None], is_row[None, :]
        if not EVEN:
            left_held, right_held = left_held & (column < end)[None, :], right_held & (column < end)[:, None]
        left = tl.load(lines + column[None, :], mask=left_held, other=0.0)
        right = tl.load(others + column[:, None], mask=right_held, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    place = row.to(tl.int64)[None, :] * features + feature[:, None]
    tl.store(out + place, total, mask=is_feature[:, None] & is_row[None, :])


_BLOCK = 1024


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, offset: float | None = None
) -> Tensor:
    """Same as the reference op. # hidden, delta [rows, hidden], contiguous -> [rows, hidden]"""
    width = weight.shape[0]
    out = hidden.new_empty(hidden.shape)
    if hidden.numel():
        assert all(x is None or x.is_contiguous() for x in (hidden, delta)), "rows stand side by side"
        _add_norm[(hidden.numel() // width,)](
            hidden, hidden if delta is None else delta, weight, out, epsilon,
            ADDS=delta is not None, OFFSET=offset, WIDTH=width, BLOCK=triton.next_power_of_2(width),
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


@triton.jit
def _add_norm(
    hidden: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    epsilon: tl.tensor,
    ADDS: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.arange(0, BLOCK)
    held = place < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + place
    kind: tl.constexpr = hidden.dtype.element_ty
    value = tl.load(hidden + at, mask=held, other=0.0).to(tl.float32)
    if ADDS:
        value = (value + tl.load(delta + at, mask=held, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        tl.store(hidden + at, value, mask=held)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + epsilon)
    tl.store(out + at, _weighted(value * scale, weight + place, held, kind, OFFSET), mask=held)


def gate_mul(joined: Tensor, gate: GateForm) -> Tensor:
    """Same as the reference op. # [..., 2 * width] -> [..., width]"""
    rows = joined.reshape(-1, joined.shape[-1]).contiguous()
    width = rows.shape[1] // 2
    out = rows.new_empty(rows.shape[0], width)
    if rows.shape[0]:
        _gate[(rows.shape[0], triton.cdiv(width, _BLOCK))](
            rows, out, ACTIVATION=gate.activation, LIMIT=gate.limit, WIDTH=width, BLOCK=_BLOCK, enable_fp_fusion=True
        )
    return out.view(*joined.shape[:-1], width)


@triton.jit
def _gate(
    joined: tl.tensor,
    out: tl.tensor,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = place < WIDTH
    gate = tl.load(joined + row * 2 * WIDTH + place, mask=held, other=0.0).to(tl.float32)
    up = tl.load(joined + row * 2 * WIDTH + WIDTH + place, mask=held, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + place, gated(gate, up, ACTIVATION, LIMIT, out.dtype.element_ty), mask=held)


@triton.jit
def gated(
    gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, kind: tl.constexpr
) -> tl.tensor:
    """Compute `kernels.layers.gate_mul` of tiles; values that it rounds are rounded to `kind`. # both float32"""
    if ACTIVATION == "clamped_swiglu":
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    angle = gate
    if ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh(x)) = 1 / (1 + exp(-2 x))
        angle = 1.5957691216 * (gate + 0.044715 * gate * gate * gate)
    if ACTIVATION == "sigmoid":
        gate = tl.full(gate.shape, 1.0, tl.float32)
    return (gate / (1.0 + tl.exp(-angle))).to(kind).to(tl.float32) * up


def rotary_store(joined: Tensor, rotary: RotaryRows | None, slots: Tensor, pool: Tensor, heads: Heads) -> Tensor:
    """Same as the reference op; if rows share a slot, any of them may be stored.
    # -> queries [rows, query heads, dim]"""
    rows, kv_heads, dim = slots.shape[0], pool.shape[2], pool.shape[3]
    query = joined.new_empty(rows, heads.query_heads, dim)
    query_norm, key_norm = heads.norms or (joined, joined)
    span = triton.next_power_of_2(len(query_norm)) if spans_projection(heads.norms, dim) else 0
    cos, sin, scale = rotary or (joined, joined, None)
    rotated = 0 if rotary is None else cos.shape[1]
    if rows:
        _rotate_store[(rows, heads.query_heads + (len(heads.projected) - 1) * kv_heads)](
            joined.contiguous(), cos.contiguous(), sin.contiguous(), joined if scale is None else scale, slots,
            pool[0], pool[1], query, query_norm, key_norm, heads.epsilon, NORMS=heads.norms is not None,
            OFFSET=heads.norm_offset, SPAN=span, SCALES=scale is not None, VALUE_NORM=heads.value_norm,
            KEYS_ARE_VALUES=heads.projected == "qk", QUERY_HEADS=heads.query_heads, KV_HEADS=kv_heads,
            DIM=dim, HALF=rotated // 2, BLOCK=triton.next_power_of_2(dim), enable_fp_fusion=False,
        )  # fmt: skip
    return query


@triton.jit
def _rotate_store(
    joined: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_scale: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    epsilon: tl.tensor,
    NORMS: tl.constexpr,
    OFFSET: tl.constexpr,
    SPAN: tl.constexpr,  # elements of all heads that are normed together, rounded up; 0 if each head is normed alone
    SCALES: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # of the columns that are rotated
    BLOCK: tl.constexpr,
) -> None:
    """Norm, rotate and store one head of one row. Each column is computed beside its partner of the other half."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    held, turns = place < DIM, place < 2 * HALF
    partner = tl.where(place < HALF, place + HALF, tl.where(turns, place - HALF, place))
    kind: tl.constexpr = joined.dtype.element_ty
    source = joined + (row * tl.num_programs(1) + head) * DIM
    own = tl.load(source + place, mask=held, other=0.0).to(tl.float32)
    slot = tl.load(slots + row) * KV_HEADS + head - QUERY_HEADS
    if head >= QUERY_HEADS + (0 if KEYS_ARE_VALUES else KV_HEADS):
        value = own * tl.rsqrt(tl.sum(own * own, 0) / DIM + epsilon) if VALUE_NORM else own
        tl.store(values + (slot - (0 if KEYS_ARE_VALUES else KV_HEADS)) * DIM + place, value, mask=held)
    if head < QUERY_HEADS + KV_HEADS:
        other = tl.load(source + partner, mask=held, other=0.0).to(tl.float32)
        if NORMS:
            norm, first, width = query_norm, 0, QUERY_HEADS * DIM
            if head >= QUERY_HEADS:
                norm, first, width = key_norm, QUERY_HEADS, KV_HEADS * DIM
            mean = tl.sum(own * own, 0) / DIM
            if SPAN:
                mean = _mean_square(joined + (row * tl.num_programs(1) + first) * DIM, width, SPAN)
                norm += (head - first) * DIM
            scale = tl.rsqrt(mean + epsilon)
            own = _weighted(own * scale, norm + place, held, kind, OFFSET)
            other = _weighted(other * scale, norm + partner, held, kind, OFFSET)
        if HALF:
            angle = row * 2 * HALF + place
            across = tl.where(place < HALF, -other, other)
            own = tl.where(turns, _turned(own, across, cos + angle, sin + angle, turns, kind), own)
        if SCALES and head < QUERY_HEADS:
            own = (own * tl.load(query_scale + row).to(tl.float32)).to(kind).to(tl.float32)
    if head < QUERY_HEADS:
        tl.store(query + (row * QUERY_HEADS + head) * DIM + place, own, mask=held)
    elif head < QUERY_HEADS + KV_HEADS:
        tl.store(keys + slot * DIM + place, own, mask=held)


@triton.jit
def _mean_square(x: tl.tensor, width: tl.tensor, SPAN: tl.constexpr) -> tl.tensor:
    place = tl.arange(0, SPAN)
    whole = tl.load(x + place, mask=place < width, other=0.0).to(tl.float32)
    return tl.sum(whole * whole, 0) / width


@triton.jit
def _weighted(x: tl.tensor, weight: tl.tensor, held: tl.tensor, kind: tl.constexpr, OFFSET: tl.constexpr) -> tl.tensor:
    weights = tl.load(weight, mask=held, other=0.0).to(tl.float32)
    weighted = x.to(kind).to(tl.float32) * weights if OFFSET is None else (OFFSET + weights) * x
    return weighted.to(kind).to(tl.float32)


@triton.jit
def _turned(
    x: tl.tensor, across: tl.tensor, cos: tl.tensor, sin: tl.tensor, held: tl.tensor, kind: tl.constexpr
) -> tl.tensor:
    """Compute x cos + across sin, rounding the products and the sum to type `kind`. # x, across float32"""
    along = x * tl.load(cos, mask=held, other=0.0).to(tl.float32)
    aside = across * tl.load(sin, mask=held, other=0.0).to(tl.float32)
    return (along.to(kind).to(tl.float32) + aside.to(kind).to(tl.float32)).to(kind).to(tl.float32)
