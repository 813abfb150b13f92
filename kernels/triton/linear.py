# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""The linear layer of `kernels/linear.py`: every row is summed in one order, however many rows there are.

The columns of a layer are cut into sections by its shape alone. A section is one chain of multiply-adds in the order
of its columns, in float32, and a row is the sum of its sections in their order. With few rows, when weights must be
streamed by as many processors as there are, each section is a program of its own and the last to arrive adds them up;
with many rows one program computes all sections of its tile. Weights are the left factor of the products, so that
tiles of few and of many rows use the same instructions of the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear import Product

_FEATURES = 64  # of a tile of few rows; the fewest that fill the left factor of a product
_PROGRAMS = 256  # enough to keep a device's memory busy
_MOST_TILES = 128  # of which sections are computed apart
_SHORTEST_SECTION = 512
_SECTION_STEP = 128  # every tile takes a section in whole steps
_MOST_SECTIONS = 8


@dataclass(frozen=True, slots=True)
class _Tile:
    """What a program computes, and how."""

    rows: int
    features: int
    columns: int
    warps: int
    stages: int


_TILES = {
    16: _Tile(16, 64, 128, 4, 5),
    32: _Tile(32, 64, 128, 4, 5),
    64: _Tile(64, 64, 64, 4, 5),
    128: _Tile(128, 128, 64, 8, 4),
}
"""By the most rows they are for; more rows are more tiles of the last kind."""

_FLOAT32 = _Tile(16, 64, 32, 4, 2)
"""Products in full precision run without matrix instructions, and their tiles must fit into registers."""


def plan_linear(weight: Tensor, bias: Tensor | None) -> Product:
    """As the reference's `plan_linear`. A plan runs on one stream at a time."""
    return _Planned(weight, bias)


class _Planned:
    """One layer's weights, and how many of a tile's sections have arrived."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        features, columns = weight.shape
        self._weight, self._bias = weight.contiguous(), bias
        self._sections = num_sections(features, columns)
        self._arrived = torch.zeros(_MOST_TILES, dtype=torch.int32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        features, columns = self._weight.shape
        lines = x.reshape(-1, columns)
        rows = lines.shape[0]
        out = x.new_empty(rows, features)
        if rows:
            self._launch(lines.contiguous(), out)
        return out.view(*x.shape[:-1], features)

    def _launch(self, x: Tensor, out: Tensor) -> None:
        (rows, columns), features = x.shape, out.shape[1]
        tile = _FLOAT32 if x.dtype == torch.float32 else _tile_for(rows)
        row_tiles, feature_tiles = triton.cdiv(rows, tile.rows), triton.cdiv(features, tile.features)
        apart = self._sections > 1 and row_tiles * feature_tiles <= _MOST_TILES
        parts = x.new_empty(self._sections if apart else 0, rows, features, dtype=torch.float32)
        _linear[row_tiles, feature_tiles, self._sections if apart else 1](
            x,
            self._weight,
            x if self._bias is None else self._bias,
            out,
            parts,
            self._arrived,
            rows,
            features,
            columns,
            self._sections,
            triton.cdiv(columns, self._sections * _SECTION_STEP) * _SECTION_STEP,
            APART=apart,
            HAS_BIAS=self._bias is not None,
            EVEN=columns % tile.columns == 0,
            ROWS=tile.rows,
            FEATURES=tile.features,
            COLUMNS=tile.columns,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,
        )


def num_sections(features: int, columns: int) -> int:
    """Into how many sections a layer's columns are cut, so that enough programs stream its weights."""
    sections, tiles = 1, triton.cdiv(features, _FEATURES)
    while sections < _MOST_SECTIONS and sections * tiles < _PROGRAMS and columns >= 2 * sections * _SHORTEST_SECTION:
        sections *= 2
    return sections


def _tile_for(rows: int) -> _Tile:
    return next((tile for most, tile in _TILES.items() if rows <= most), _TILES[max(_TILES)])


@triton.jit(do_not_specialize=["rows", "sections"])
def _linear(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    arrived: tl.tensor,
    rows: tl.tensor,
    features: tl.tensor,
    columns: tl.tensor,
    sections: tl.tensor,
    section: tl.tensor,
    APART: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One tile of the output, or one section of it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    held = (feature < features)[:, None] & (row < rows)[None, :]
    place = row.to(tl.int64)[None, :] * features + feature[:, None]
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    if APART:
        here = tl.program_id(2)
        part = _section(x, weight, row, feature, rows, features, columns, here * section, section,
                        EVEN, ROWS, FEATURES, COLUMNS)  # fmt: skip
        tl.store(parts + here * rows * features + place, part, mask=held)
        tl.debug_barrier()  # all of this program's part is stored before it is counted
        count = arrived + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(count, 1, sem="acq_rel") < sections - 1:
            return
        tl.store(count, 0)
        for each in range(sections):
            total += tl.load(parts + each * rows * features + place, mask=held, other=0.0, cache_modifier=".cg")
    else:
        for each in range(sections):
            total += _section(x, weight, row, feature, rows, features, columns, each * section, section,
                              EVEN, ROWS, FEATURES, COLUMNS)  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)[:, None]
    tl.store(out + place, total, mask=held)


@triton.jit
def _section(
    x: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,
    feature: tl.tensor,
    rows: tl.tensor,
    features: tl.tensor,
    columns: tl.tensor,
    begin: tl.tensor,
    section: tl.tensor,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Products of some columns, added one after the other. # -> [features, rows] float32"""
    lines = weight + feature.to(tl.int64)[:, None] * columns
    others = x + row.to(tl.int64)[None, :] * columns
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in range(begin, tl.minimum(begin + section, columns), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_feature, is_row = (feature < features)[:, None], (row < rows)[None, :]
        if not EVEN:
            is_feature, is_row = is_feature & (column < columns)[None, :], is_row & (column < columns)[:, None]
        left = tl.load(lines + column[None, :], mask=is_feature, other=0.0)
        right = tl.load(others + column[:, None], mask=is_row, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    return total
