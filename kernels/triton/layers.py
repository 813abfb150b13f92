# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""The ops of `kernels/layers.py`, each in one launch.
One program norms a row, and one rotates a head of a row: sums do not depend on the batch. Values that the references
round are rounded here, and products of the rotation are not fused with their sum, so that its bits are the
reference's."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.layers import spans_projection

_BLOCK = 1024


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """As the reference. # hidden, delta [rows, hidden] without gaps -> [rows, hidden]"""
    width = weight.shape[0]
    out = hidden.new_empty(hidden.shape)
    if hidden.numel():
        assert all(x is None or x.is_contiguous() for x in (hidden, delta)), "rows stand side by side"
        _add_norm[(hidden.numel() // width,)](
            hidden, hidden if delta is None else delta, weight, out, epsilon,
            ADDS=delta is not None, WIDTH=width, BLOCK=triton.next_power_of_2(width), enable_fp_fusion=True,
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
    tl.store(out + at, _weighted(value * scale, weight + place, held, kind), mask=held)


def silu_mul(joined: Tensor) -> Tensor:
    """As the reference. # [..., 2 * width] -> [..., width]"""
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


def rotary_store(
    joined: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pool: Tensor,
    query_heads: int,
    head_norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
) -> Tensor:
    """As the reference; of rows with the same slot any may win. # -> queries [rows, query heads, dim]"""
    rows, kv_heads, dim = slots.shape[0], pool.shape[2], pool.shape[3]
    query = joined.new_empty(rows, query_heads, dim)
    query_norm, key_norm = head_norms or (joined, joined)
    span = triton.next_power_of_2(len(query_norm)) if spans_projection(head_norms, dim) else 0
    if rows:
        _rotate_store[(rows, query_heads + 2 * kv_heads)](
            joined.contiguous(), cos.contiguous(), sin.contiguous(), slots, pool[0], pool[1], query,
            query_norm, key_norm, epsilon, NORMS=head_norms is not None, SPAN=span, QUERY_HEADS=query_heads,
            KV_HEADS=kv_heads, HALF=dim // 2, BLOCK=triton.next_power_of_2(dim // 2), enable_fp_fusion=False,
        )  # fmt: skip
    return query


@triton.jit
def _rotate_store(
    joined: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    epsilon: tl.tensor,
    NORMS: tl.constexpr,
    SPAN: tl.constexpr,  # 0, or elements that hold all heads that are normed together
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One head of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    held = place < HALF
    kind: tl.constexpr = joined.dtype.element_ty
    source = joined + (row * tl.num_programs(1) + head) * 2 * HALF + place
    first = tl.load(source, mask=held, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=held, other=0.0).to(tl.float32)
    if head < QUERY_HEADS + KV_HEADS:
        if NORMS:
            norm = (query_norm if head < QUERY_HEADS else key_norm) + place
            if SPAN:
                start = tl.where(head < QUERY_HEADS, 0, QUERY_HEADS)
                width = tl.where(head < QUERY_HEADS, QUERY_HEADS, KV_HEADS) * 2 * HALF
                spanned = tl.arange(0, SPAN)
                heads = joined + (row * tl.num_programs(1) + start) * 2 * HALF + spanned
                whole = tl.load(heads, mask=spanned < width, other=0.0).to(tl.float32)
                mean = tl.sum(whole * whole, 0) / width
                norm += (head - start) * 2 * HALF
            else:
                mean = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF)
            scale = tl.rsqrt(mean + epsilon)
            first = _weighted(first * scale, norm, held, kind)
            second = _weighted(second * scale, norm + HALF, held, kind)
        angle = row * 2 * HALF + place
        turned = _turned(first, -second, cos + angle, sin + angle, held, kind)
        second = _turned(second, first, cos + angle + HALF, sin + angle + HALF, held, kind)
        first = turned
    own = (tl.load(slots + row) * KV_HEADS + head - QUERY_HEADS) * 2 * HALF + place
    # three stores: queries and the pool may be of two types of numbers
    if head < QUERY_HEADS:
        _store_halves(query + (row * QUERY_HEADS + head) * 2 * HALF + place, first, second, held, HALF)
    elif head < QUERY_HEADS + KV_HEADS:
        _store_halves(keys + own, first, second, held, HALF)
    else:
        _store_halves(values + own - KV_HEADS * 2 * HALF, first, second, held, HALF)


@triton.jit
def _store_halves(to: tl.tensor, first: tl.tensor, second: tl.tensor, held: tl.tensor, HALF: tl.constexpr) -> None:
    tl.store(to, first, mask=held)
    tl.store(to + HALF, second, mask=held)


@triton.jit
def _weighted(x: tl.tensor, weight: tl.tensor, held: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    weighted = x.to(kind).to(tl.float32) * tl.load(weight, mask=held, other=0.0).to(tl.float32)
    return weighted.to(kind).to(tl.float32)


@triton.jit
def _turned(
    x: tl.tensor, across: tl.tensor, cos: tl.tensor, sin: tl.tensor, held: tl.tensor, kind: tl.constexpr
) -> tl.tensor:
    """Products are rounded to a kind of number before they are added, and their sum too. # x, across float32"""
    along = x * tl.load(cos, mask=held, other=0.0).to(tl.float32)
    aside = across * tl.load(sin, mask=held, other=0.0).to(tl.float32)
    return (along.to(kind).to(tl.float32) + aside.to(kind).to(tl.float32)).to(kind).to(tl.float32)
