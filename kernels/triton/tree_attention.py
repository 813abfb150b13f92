# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""Tree attention of `kernels/tree_attention.py` on a device, summed in an order that depends on positions alone.

A *tile* holds query heads of a few rows of one sequence: a root, tree nodes, or a part of a prompt.

- The prefix of a row at position p, the keys before its boundary b(p) = max(0, p - MAX_DEPTH), is committed in any
  tree. Tensor cores sum it in chunks of 64 keys, and chunks in splits of 512 keys, both aligned at multiples of their
  size; the splits are added up in order.
- The tail, the keys from b(p) on and the nodes of the row's path, is summed strictly in column order, one fused
  multiply-add per key, so that the gaps between a path's nodes do not change the result.

Sizes depend on the model alone, never on load: a row's sums are the same alone and in any batch. Launches are static,
as CUDA graphs need: grids depend on shapes, and loop bounds are read from device memory.

Legend: members = rows of a tile x query heads per key/value head, dim = head_dim, others as in the reference. Scores
are scaled by log2 e.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tree_attention import LOG2_E, MAX_DEPTH, AttentionForm, AttentionRows
from kernels.triton.layers import tiled

_CHUNK = tl.constexpr(64)  # keys per product of the prefix: three stages of 128 dimensions fit into 100 KB
_SPLIT = tl.constexpr(512)  # keys that one program sums: long contexts are spread over the device
_COLUMNS = tl.constexpr(32)  # keys per product of the tail; does not change its sums
_MAX_DEPTH = tl.constexpr(MAX_DEPTH)
_LOG2_E = tl.constexpr(LOG2_E)
_MASKED = tl.constexpr(-1e30)  # score of an invisible key; finite, so that padding has no NaN

_FEWEST = 16  # smallest side of a product in Triton
_PARTIAL_BYTES = 64 << 20
_NO_WINDOW = 1 << 30


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The attention of one forward, planned as tiles of its rows, for all layers."""

    rows: AttentionRows
    slot_table: Tensor  # [table rows, max positions] int64
    tile_rows: Tensor  # [tiles, rows of a tile] int64, -1 padded

    def attend(self, query: Tensor, pool: Tensor, form: AttentionForm) -> Tensor:
        """Same as the reference op; rows in no tile get zeros.
        # query [rows, query heads, dim]; pool [2, slots, heads, dim] -> query"""
        (heads, dim), query, sum_type = pool.shape[2:], query.contiguous(), torch.float32
        splits, out = triton.cdiv(self.slot_table.shape[1], _SPLIT.value), torch.zeros_like(query)
        group = query.shape[1] // heads
        members, block_dim = _members_of(group), max(_FEWEST, triton.next_power_of_2(dim))
        sizes = heads, group, dim, splits, members, block_dim  # all follow from the model and its longest context
        bounds = (form.scale * LOG2_E, (form.softcap or 0.0) * LOG2_E, form.window or _NO_WINDOW)
        # Warps whose registers hold the sums, and pipeline stages that fit into 99 KB of memory.
        schedule = {"num_warps": 4, "num_stages": 3} if dim <= 256 else {"num_warps": 8, "num_stages": 1}
        options = {**schedule, "enable_fp_fusion": True}
        rows = tuple(getattr(self.rows, name) for name in AttentionRows.__slots__)
        tiles_at_once = max(1, _PARTIAL_BYTES // (heads * splits * members * (dim + 2) * sum_type.itemsize))
        for tiles in self.tile_rows.split(tiles_at_once):
            sums = query.new_empty(len(tiles), heads, splits, members, dim, dtype=sum_type)
            tops_totals = query.new_empty(len(tiles), heads, splits, 2, members, dtype=sum_type)
            inputs = (query, pool[0], pool[1], tiles, rows, self.slot_table, self.slot_table.shape[1])
            _prefix_kernel[len(tiles), heads, splits](*inputs, sums, tops_totals, *bounds, *sizes, **options)
            _tail_kernel[len(tiles), heads](
                *inputs, self.rows.node_slots.shape[1], sums, tops_totals, out, form.sinks, *bounds, *sizes,
                **options,
            )  # fmt: skip
        return out


def plan_attention(rows: AttentionRows, slot_table: Tensor, *, query_heads: int, kv_heads: int) -> TilePlan:
    """Same as the reference op, without a transfer from the device; rows may be in any order.
    # slot_table [table rows, max positions]"""
    group = query_heads // kv_heads
    trees = {name: getattr(rows, name).contiguous() for name in ("node_slots", "node_depths", "ancestors")}
    tiles = tiled(rows.sequence, len(rows.table_rows), _members_of(group) // group)
    return TilePlan(replace(rows, **trees), slot_table, tiles)


def _members_of(group: int) -> int:
    return max(_FEWEST, int(triton.next_power_of_2(group)))


@triton.jit
def _prefix_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tile_rows: tl.tensor,
    rows: tl.tuple,
    table: tl.tensor,
    line_length: tl.tensor,
    sums: tl.tensor,
    tops_totals: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Sum one split of the prefix for one tile and one key/value head: largest scores, weights and weighted values."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, positions, _, table_rows, _, _, _, _ = rows
    row, _, boundary, first = _members(tile_rows, positions, window, tile, GROUP, MEMBERS)
    nearest = tl.min(tl.where(row >= 0, first, line_length), 0)
    begin = tl.maximum(split * _SPLIT, nearest // _CHUNK * _CHUNK)
    end = tl.minimum((split + 1) * _SPLIT, tl.max(boundary, 0))
    if begin >= end:
        return
    line = tl.load(table_rows + tl.load(sequence + tl.max(row, 0))) * line_length
    queries = _load_queries(query, row, head, HEADS, GROUP, DIM, MEMBERS, BLOCK_DIM).to(keys.dtype.element_ty)
    top = tl.full([MEMBERS], _MASKED, tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    mixed = tl.zeros([MEMBERS, BLOCK_DIM], tl.float32)
    for start in range(begin, end, _CHUNK):
        column = start + tl.arange(0, _CHUNK)
        slot = tl.load(table + line + column, mask=column < end, other=0)
        seen = (column[None, :] < boundary[:, None]) & (column[None, :] >= first[:, None])
        score = _scores(queries, _load_slots(keys, slot, column < end, head, HEADS, DIM, BLOCK_DIM), seen, scale, cap)
        value = _load_slots(values, slot, column < end, head, HEADS, DIM, BLOCK_DIM)
        higher = tl.maximum(top, tl.max(score, 1))
        fade = tl.exp2(top - higher)
        weight = tl.where(seen, tl.exp2(score - higher[:, None]), 0.0)
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = higher
    at = (tile * HEADS + head) * SPLITS + split
    member, dim = tl.arange(0, MEMBERS), tl.arange(0, BLOCK_DIM)
    tl.store(tops_totals + at * 2 * MEMBERS + member, top)
    tl.store(tops_totals + (at * 2 + 1) * MEMBERS + member, total)
    tl.store(sums + (at * MEMBERS + member)[:, None] * DIM + dim[None, :], mixed, mask=dim[None, :] < DIM)


@triton.jit(do_not_specialize=["nodes"])
def _tail_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tile_rows: tl.tensor,
    rows: tl.tuple,
    table: tl.tensor,
    line_length: tl.tensor,
    nodes: tl.tensor,
    sums: tl.tensor,
    tops_totals: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor | None,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Add up a tile's splits and its tail, in two passes over the tail: largest scores, then sums relative to them."""
    tile, head = tl.program_id(0), tl.program_id(1)
    members = _members(tile_rows, rows[1], window, tile, GROUP, MEMBERS)
    row, _, boundary, first = members
    if tl.max(row, 0) < 0:
        return
    at = (tile * HEADS + head) * SPLITS
    top, total, mixed = _add_splits(sums, tops_totals, at, boundary, first, DIM, MEMBERS, BLOCK_DIM)
    queries = _load_queries(query, row, head, HEADS, GROUP, DIM, MEMBERS, BLOCK_DIM).to(keys.dtype.element_ty)
    tail, columns = _tail_of(rows, table, line_length, nodes, members)
    highest = top
    if sinks is not None:
        logit = tl.load(sinks + head * GROUP + tl.arange(0, MEMBERS) % GROUP) * _LOG2_E
        highest = tl.maximum(highest, logit)
    for column in range(0, columns, _COLUMNS):
        slot, held, seen = _tail_columns(column, tail)
        key = _load_slots(keys, slot, held, head, HEADS, DIM, BLOCK_DIM)
        highest = tl.maximum(highest, tl.max(_scores(queries, key, seen, scale, cap), 1))
    fade = tl.exp2(top - highest)
    totals = (total * fade)[:, None] + tl.zeros([MEMBERS, 16], tl.float32)
    mixed = mixed * fade[:, None]
    for column in range(0, columns, _COLUMNS):
        slot, held, seen = _tail_columns(column, tail)
        key = _load_slots(keys, slot, held, head, HEADS, DIM, BLOCK_DIM)
        value = _load_slots(values, slot, held, head, HEADS, DIM, BLOCK_DIM).to(tl.float32)
        score = _scores(queries, key, seen, scale, cap)
        weight = tl.where(seen, tl.exp2(score - highest[:, None]), 0.0)
        # products in float32 are chains of multiply-adds in column order; for the weights alone as well
        totals = tl.dot(weight, tl.full([_COLUMNS, 16], 1.0, tl.float32), totals, input_precision="ieee")
        mixed = tl.dot(weight, value, mixed, input_precision="ieee")
    whole = tl.max(totals, 1)
    if sinks is not None:
        whole += tl.exp2(logit - highest)
    result = mixed / tl.where(whole > 0, whole, 1.0)[:, None]
    _store_rows(out, result, row, head, HEADS, GROUP, DIM, MEMBERS, BLOCK_DIM)


@triton.jit
def _tail_of(rows: tl.tuple, table: tl.tensor, line_length: tl.tensor, nodes: tl.tensor, members: tl.tuple) -> tl.tuple:
    """Describe a tile's tail for `_tail_columns`, and return its number of columns."""
    sequence, _, node, table_rows, extend_end, node_slots, node_depths, ancestors = rows
    row, position, boundary, first = members
    of = tl.load(sequence + tl.max(row, 0))
    root = tl.load(extend_end + of)
    own = tl.load(node + row, mask=row >= 0, other=-1)
    start = tl.min(tl.where(row >= 0, tl.maximum(boundary, first), line_length), 0)
    committed = tl.maximum(tl.minimum(tl.max(position, 0), root) + 1 - start, 0)
    padded = tl.cdiv(committed, _COLUMNS) * _COLUMNS  # then come the columns of the nodes
    extend_slots = table + tl.load(table_rows + of) * line_length + start
    tree = (node_slots + of * nodes, node_depths + of * nodes, ancestors + of * nodes * nodes, nodes)
    return (extend_slots, committed, start, padded, tree, root, own, members), padded + tl.max(own, 0) + 1


@triton.jit
def _members(
    tile_rows: tl.tensor,
    positions: tl.tensor,
    window: tl.tensor,
    tile: tl.tensor,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
) -> tl.tuple:
    """Return row (-1 for padding), position, boundary and first visible position of a tile's members.
    # all [members]"""
    rows: tl.constexpr = MEMBERS // GROUP
    place = tl.arange(0, MEMBERS) // GROUP
    row = tl.load(tile_rows + tile * rows + place, mask=place < rows, other=-1)
    position = tl.load(positions + row, mask=row >= 0, other=0)
    boundary = tl.maximum(position - _MAX_DEPTH, 0)
    return row, position, boundary, tl.maximum(position - window + 1, 0)


@triton.jit
def _add_splits(
    sums: tl.tensor,
    tops_totals: tl.tensor,
    at: tl.tensor,
    boundary: tl.tensor,
    first: tl.tensor,
    DIM: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tuple:
    """Combine the splits of the prefix in order; returns its largest scores, weights and weighted values."""
    member, dim = tl.arange(0, MEMBERS), tl.arange(0, BLOCK_DIM)
    top = tl.full([MEMBERS], _MASKED, tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    mixed = tl.zeros([MEMBERS, BLOCK_DIM], tl.float32)
    for split in range(0, tl.cdiv(tl.max(boundary, 0), _SPLIT)):
        within = (split * _SPLIT < boundary) & ((split + 1) * _SPLIT > first) & (first < boundary)
        here = at + split
        its_top = tl.load(tops_totals + here * 2 * MEMBERS + member, mask=within, other=_MASKED)
        its_total = tl.load(tops_totals + (here * 2 + 1) * MEMBERS + member, mask=within, other=0.0)
        inside = within[:, None] & (dim[None, :] < DIM)
        its_mixed = tl.load(sums + (here * MEMBERS + member)[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
        higher = tl.maximum(top, its_top)
        fade, its_fade = tl.exp2(top - higher), tl.exp2(its_top - higher)
        total = total * fade + its_total * its_fade
        mixed = mixed * fade[:, None] + its_mixed * its_fade[:, None]
        top = higher
    return top, total, mixed


@triton.jit
def _tail_columns(column: tl.tensor, tail: tl.tuple) -> tl.tuple:
    """Return slot and existence [columns], and visibility [members, columns], of the tail's next columns. The first
    columns are the `committed` keys from position `start` on; the nodes begin at column `padded`."""
    extend_slots, committed, start, padded, tree, root, own, members = tail
    (tree_slots, depths, above, nodes), (_, position, boundary, first) = tree, members
    place = column + tl.arange(0, _COLUMNS)
    on_extend = place < committed
    node = place - padded
    in_tree = (node >= 0) & (node <= tl.max(own, 0))
    slot = tl.load(extend_slots + place, mask=on_extend, other=0)
    slot += tl.load(tree_slots + node, mask=in_tree, other=0)
    depth = tl.load(depths + node, mask=in_tree, other=0)
    at = tl.where(in_tree, root + depth, start + place)[None, :]
    on_path = in_tree[None, :] & (own >= 0)[:, None]
    on_path = tl.load(above + own[:, None] * nodes + node[None, :], mask=on_path, other=0) != 0
    before = on_extend[None, :] & (at >= boundary[:, None]) & (at <= position[:, None])
    return slot, on_extend | in_tree, (before | on_path) & (at >= first[:, None])


@triton.jit
def _scores(queries: tl.tensor, keys: tl.tensor, seen: tl.tensor, scale: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Compute scaled and masked scores; `cap` bounds them, 0 = off.
    # queries [members, dim], keys [columns, dim] -> [members, columns]"""
    score = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if cap > 0:
        score = cap * (2 * tl.sigmoid(2 * (score / cap)) - 1)
    return tl.where(seen, score, _MASKED)


@triton.jit
def _load_slots(
    plane: tl.tensor,
    slot: tl.tensor,
    held: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Load keys or values of slots; zeros where `held` is false. # -> [columns, dim]"""
    dim = tl.arange(0, BLOCK_DIM)
    where = (slot * HEADS + head)[:, None] * DIM + dim[None, :]
    return tl.load(plane + where, mask=held[:, None] & (dim[None, :] < DIM), other=0.0)


@triton.jit
def _load_queries(
    query: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Load the queries of a tile's members. # -> [members, dim]"""
    dim = tl.arange(0, BLOCK_DIM)
    line = (row * HEADS + head) * GROUP + tl.arange(0, MEMBERS) % GROUP
    return tl.load(
        query + line[:, None] * DIM + dim[None, :], mask=(row >= 0)[:, None] & (dim < DIM)[None, :], other=0.0
    )


@triton.jit
def _store_rows(
    out: tl.tensor,
    result: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Store the results of a tile's members. # result [members, dim]"""
    dim = tl.arange(0, BLOCK_DIM)
    line = (row * HEADS + head) * GROUP + tl.arange(0, MEMBERS) % GROUP
    tl.store(out + line[:, None] * DIM + dim[None, :], result, mask=(row >= 0)[:, None] & (dim < DIM)[None, :])
