# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""The store of `kernels/store_kv.py` in one launch, one program per row: nothing is joined first."""

import triton
import triton.language as tl
from torch import Tensor


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
