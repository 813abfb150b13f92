# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""The embedding of `kernels/rotary.py` in one launch for queries and keys, one program per row and head.

Rounded where the reference rounds and without fused multiply-adds, so that its bits are the reference's.
"""

import triton
import triton.language as tl
from torch import Tensor


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
