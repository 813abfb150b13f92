# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""The ops of `kernels/layers.py`, each in one launch.
The norm takes a line, a row or a head of a row, per program: a line's sums are the same alone and in company, and lines
may stand apart, as the heads of a joined product do. The rotary embedding and the store take a row per program; the
former is rounded where the reference rounds and without fused multiply-adds, so that its bits are the reference's."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As the reference's `rms_norm`. # the numbers of a line stand side by side"""
    hidden = weight.shape[0]
    out = x.new_empty(x.shape)
    if x.numel():
        lines = x.reshape(-1, x.shape[-2] if x.dim() > 1 else 1, hidden)
        assert lines.stride(2) == 1, "the numbers of a line stand side by side"
        _norm[lines.shape[:2]](
            lines, weight, out, lines.stride(0), lines.stride(1), epsilon,
            HIDDEN=hidden, BLOCK=triton.next_power_of_2(hidden), enable_fp_fusion=True,
        )  # fmt: skip
    return out


@triton.jit
def _norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    epsilon: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    outer, inner = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = tl.arange(0, BLOCK)
    held = place < HIDDEN
    value = tl.load(x + outer * outer_stride + inner * inner_stride + place, mask=held, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + epsilon)
    rounded = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    weighted = rounded * tl.load(weight + place, mask=held, other=0.0).to(tl.float32)
    tl.store(out + (outer * tl.num_programs(1) + inner) * HIDDEN + place, weighted, mask=held)


def silu_mul(joined: Tensor) -> Tensor:
    """As the reference's `silu_mul`."""
    rows = joined.reshape(-1, joined.shape[-1]).contiguous()
    width = rows.shape[1] // 2
    out = rows.new_empty(rows.shape[0], width)
    if rows.shape[0]:
        _gate[(rows.shape[0], triton.cdiv(width, _BLOCK))](rows, out, WIDTH=width, BLOCK=_BLOCK, enable_fp_fusion=True)
    return out.view(*joined.shape[:-1], width)


@triton.jit
def _gate(joined: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = place < WIDTH
    gate = tl.load(joined + row * 2 * WIDTH + place, mask=held, other=0.0).to(tl.float32)
    up = tl.load(joined + row * 2 * WIDTH + WIDTH + place, mask=held, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + place, opened * up, mask=held)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference's `rotary`. # the numbers of a head stand side by side, in the results those of a row do"""
    assert query.shape[0] == 1, "all rows of a forward stand in one batch"
    queries, keys = query[0].transpose(0, 1), key[0].transpose(0, 1)  # [rows, heads, dim]
    cos, sin = cos[0].contiguous(), sin[0].contiguous()
    assert queries.stride(2) == keys.stride(2) == 1, "the numbers of a head stand side by side"
    rows, query_heads, dim = queries.shape
    turned, turned_keys = queries.new_empty(queries.shape), keys.new_empty(keys.shape)
    if rows:
        _rotate[(rows, query_heads + keys.shape[1])](
            queries, keys, cos, sin, turned, turned_keys,
            queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1),
            QUERY_HEADS=query_heads, KV_HEADS=keys.shape[1], HALF=dim // 2,
            BLOCK=triton.next_power_of_2(dim // 2), enable_fp_fusion=False,
        )  # fmt: skip
    return turned.transpose(0, 1)[None], turned_keys.transpose(0, 1)[None]


@triton.jit
def _rotate(
    query: tl.tensor,
    key: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    turned: tl.tensor,
    turned_key: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = row * 2 * HALF
    if head < QUERY_HEADS:
        to = (row * QUERY_HEADS + head) * 2 * HALF
        _rotate_head(query + row * query_row + head * query_head, turned + to, cos + angles, sin + angles, HALF, BLOCK)
    else:
        head -= QUERY_HEADS
        to = (row * KV_HEADS + head) * 2 * HALF
        _rotate_head(key + row * key_row + head * key_head, turned_key + to, cos + angles, sin + angles, HALF, BLOCK)


@triton.jit
def _rotate_head(
    source: tl.tensor, target: tl.tensor, cos: tl.tensor, sin: tl.tensor, HALF: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    place = tl.arange(0, BLOCK)
    held = place < HALF
    kind: tl.constexpr = target.dtype.element_ty
    first = tl.load(source + place, mask=held, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + place, mask=held, other=0.0).to(tl.float32)
    tl.store(target + place, _turned(first, -second, cos + place, sin + place, held, kind), mask=held)
    angle = HALF + place
    tl.store(target + angle, _turned(second, first, cos + angle, sin + angle, held, kind), mask=held)


@triton.jit
def _turned(
    x: tl.tensor, across: tl.tensor, cos: tl.tensor, sin: tl.tensor, held: tl.tensor, kind: tl.constexpr
) -> tl.tensor:
    """Products are rounded to a kind of number before they are added. # x, across float32"""
    along = x * tl.load(cos, mask=held, other=0.0).to(tl.float32)
    aside = across * tl.load(sin, mask=held, other=0.0).to(tl.float32)
    return along.to(kind).to(tl.float32) + aside.to(kind).to(tl.float32)


def store_kv(pool: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
    """As the reference's `store_kv`. # the numbers of a head stand side by side; of rows with one place any may win"""
    assert keys.stride(2) == values.stride(2) == 1, "the numbers of a head stand side by side"
    rows, heads, dim = keys.shape
    if rows:
        _store[(rows, 2)](
            pool, places, keys, values,
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            HEADS=heads, DIM=dim, BLOCK_HEADS=triton.next_power_of_2(heads), BLOCK_DIM=triton.next_power_of_2(dim),
            enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit
def _store(
    pool: tl.tensor,
    places: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, dim = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
    held = (head < HEADS) & (dim < DIM)
    place = tl.load(places + part * tl.num_programs(0) + row)
    if part == 0:
        value = tl.load(keys + row * key_row + head * key_head + dim, mask=held)
    else:
        value = tl.load(values + row * value_row + head * value_head + dim, mask=held)
    tl.store(pool + (place * HEADS + head) * DIM + dim, value, mask=held)
