# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""The linear layer of `kernels/linear.py`: every row is one chain of multiply-adds in the order of its columns, in
float32, whatever tile it stands in.
With few rows the weights bound the time, and every program streams them through several buffers: enough bytes are in
flight even with fewer programs than processors, so columns need not be cut into sections that are added up later.
Weights are the left factor of the products, so that tiles of few and of many rows use the same instructions."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear import Product, Weight, dense


@dataclass(frozen=True, slots=True)
class _Tile:
    """The share of the output that a program computes, and its schedule."""

    rows: int
    features: int
    columns: int  # at once
    warps: int
    stages: int  # at most: fewer where a device has less shared memory, which changes no bit
    fewest: int  # programs below which a smaller tile is faster

    def stage_bytes(self, item: int) -> int:
        """Shared memory of one stage, for numbers of so many bytes."""
        return (self.rows + self.features) * self.columns * item


_TILES = (
    _Tile(256, 128, 64, 8, 3, fewest=256),
    _Tile(128, 128, 64, 8, 4, fewest=96),
    _Tile(128, 64, 64, 4, 6, fewest=96),
    _Tile(64, 64, 128, 4, 4, fewest=96),
    _Tile(32, 64, 128, 4, 6, fewest=0),
    _Tile(16, 64, 128, 4, 6, fewest=0),
)
"""Largest first: they compute most with what they read, but a device has work for a hundred programs and more.
Chosen by time on an H100, with the layers of an 8B model and 1 to 2048 rows (docs/gpu.md)."""

_SMALLEST_SHARED = 99 * 1024

_FLOAT32 = _Tile(16, 64, 32, 4, 2, fewest=0)
"""Products in full precision run without matrix instructions, and their tiles must fit into registers."""


def plan_linear(weight: Weight, bias: Tensor | None) -> Product:
    """As the reference; quantised weights are made dense. # weight [out, in], bias [out]"""
    weight = dense(weight).contiguous()
    features, columns = weight.shape

    def product(x: Tensor) -> Tensor:
        lines = x.reshape(-1, columns).contiguous()
        out = x.new_empty(lines.shape[0], features)
        if lines.shape[0]:
            _launch(lines, weight, bias, out)
        return out.view(*x.shape[:-1], features)

    return product


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    (rows, columns), features = x.shape, out.shape[1]
    tile = _FLOAT32 if x.dtype == torch.float32 else _tile_for(rows, features)
    _linear[triton.cdiv(rows, tile.rows), triton.cdiv(features, tile.features)](
        x, weight, x if bias is None else bias, out, rows, features, columns,
        HAS_BIAS=bias is not None, EVEN=columns % tile.columns == 0,
        ROWS=tile.rows, FEATURES=tile.features, COLUMNS=tile.columns, num_warps=tile.warps,
        num_stages=min(tile.stages, _shared_memory(x.device) // tile.stage_bytes(x.element_size())),
        enable_fp_fusion=True,
    )  # fmt: skip


def _tile_for(rows: int, features: int) -> _Tile:
    """The largest tile that the rows fill by more than half and that leaves a device enough programs."""

    def fits(tile: _Tile) -> bool:
        programs = triton.cdiv(rows, tile.rows) * triton.cdiv(features, tile.features)
        return 2 * rows > tile.rows and programs >= tile.fewest

    return next(filter(fits, _TILES), _TILES[-1])


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can use; without a device those of the smallest."""
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
    rows: tl.tensor,
    features: tl.tensor,
    columns: tl.tensor,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One tile of the output. # tiles of rows stand side by side, so that they share the weights they read"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    is_row, is_feature = row < rows, feature < features
    lines = weight + feature.to(tl.int64)[:, None] * columns
    others = x + row.to(tl.int64)[None, :] * columns
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        left_held, right_held = is_feature[:, None], is_row[None, :]
        if not EVEN:
            left_held, right_held = left_held & (column < columns)[None, :], right_held & (column < columns)[:, None]
        left = tl.load(lines + column[None, :], mask=left_held, other=0.0)
        right = tl.load(others + column[:, None], mask=right_held, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    place = row.to(tl.int64)[None, :] * features + feature[:, None]
    tl.store(out + place, total, mask=is_feature[:, None] & is_row[None, :])
