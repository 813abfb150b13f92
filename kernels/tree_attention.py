"""Tree attention over slot-addressed keys and values: which row sees which key, and the plain-torch reference.

    out_i = sum_j p_ij v_j,   p_ij = softmax_j(q_i . k_j * scale)   over j in {committed prefix of i} + {its tree path}

Every row's sums run over the same keys, in the same order, in the same grouping, whatever else is in the step, so that
plain decoding, tree verification and any prompt chunking give equal bits. The layout that achieves this depends on a
row's absolute position p alone:

- keys before b(p) = max(0, floor((p - MAX_DEPTH) / SPAN) * SPAN) are committed whatever the tree: they form
  *chunks* of WIDTH keys, aligned at multiples of WIDTH;
- the rest is one *tail* of WIDTH columns: first the committed keys from b(p) on, by position, then the step's nodes,
  parents before children, masked to the row's own path. Masked columns add exact zeros, and products with WIDTH
  columns are summed strictly in column order, so the gaps between a path's nodes leave no trace.

Legend: rows = tokens of the forward, segment = rows of one sequence that share b(p), item = one WIDTH-key product of a
segment, members = query rows x query heads per key/value head in a segment (padded), heads = key/value heads.
"""

import math
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MAX_DEPTH = 16
"""Deepest tree node a row may be."""

MAX_NODES = 64
"""Most tree nodes of one sequence in a step."""

WIDTH = 128
"""Keys per product; wider products are split by BLAS libraries in places that depend on their shape."""

SPAN = WIDTH - MAX_NODES - MAX_DEPTH
"""Consecutive positions that share one tail; with MAX_DEPTH they fill the tail's committed half."""

COMMITTED = SPAN + MAX_DEPTH
"""Columns of a tail that hold committed keys; the other MAX_NODES hold tree nodes."""

MASKED = -1e30
"""Additive mask; finite, so that a row that sees nothing (padding) has no NaN."""

LOG2_E = math.log2(math.e)
"""Scores are in powers of two, exp(x) = exp2(x log2 e): for exp torch calls a library that wakes all threads."""

NULL_SLOT = 0
"""The slot that padding reads: never written, always zero."""

_FEW_ITEMS = 6


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """What the layout needs to know of a forward's rows. A sequence's *extend* rows (a prompt chunk, or just the root)
    are certain to be committed and already stand in the slot table; its node rows hang below the last extend row.
    Parents come before children."""

    sequence: Tensor  # [rows] int64, index into the per-sequence tensors below
    positions: Tensor  # [rows] int64, absolute
    node: Tensor  # [rows] int64, node index within the sequence's tree, -1 for extend rows
    table_rows: Tensor  # [sequences] int64, line of the slot table
    extend_end: Tensor  # [sequences] int64, position of the last extend row
    node_slots: Tensor  # [sequences, MAX_NODES] int64, NULL_SLOT padded
    node_depths: Tensor  # [sequences, MAX_NODES] int64
    ancestors: Tensor  # [sequences, MAX_NODES, MAX_NODES] bool, [s, i, j]: j is on the path to i, itself included


@dataclass(slots=True)
class AttentionBucket:
    """Index tensors for segments of similar size; built once per step and shared by all layers."""

    num_chunks: int  # items that are prefix chunks; the tails follow, one per segment
    item_queries: Tensor  # [items * heads * members] int64 into flattened [rows * query heads]
    item_keys: Tensor  # [2 * items * heads * WIDTH] int64 into the layer's flattened [2 * slots * heads]
    item_segment: Tensor  # [items] int64
    segment_items: Tensor  # [segments * (most items of a segment)] int64, absent ones name the segment's tail
    query_positions: Tensor  # [segments, members] int64
    key_positions: Tensor  # [items, WIDTH] int64
    visible: Tensor  # [items, members, WIDTH] bool
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """Additive mask for a sliding window (None = unlimited), made at first use in a step.
        # -> [items, 1, members, WIDTH] float32"""
        if window not in self.masks:
            visible = self.visible
            if window is not None:
                first = self.query_positions[self.item_segment] - window  # [items, members]
                visible = visible & (self.key_positions[:, None] > first[:, :, None])
            self.masks[window] = torch.where(visible, 0.0, MASKED)[:, None]
        return self.masks[window]


class Attention(Protocol):
    """One forward's attention, laid out for all layers."""

    def attend(
        self, query: Tensor, pool: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """Attend all rows in one layer; `softcap` bounds scores to +-softcap by tanh (Gemma 2). # query [rows, query
        heads, head_dim] in any layout; pool [2, slots, heads, head_dim], the layer's keys and values with this
        forward's rows written -> [rows, query heads, head_dim] in the query's type, from sums in float32"""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one forward's rows attend: a bucket for decoding rows and one for prompt chunks, as far as present."""

    buckets: tuple[AttentionBucket, ...]
    out_members: Tensor  # [rows * query heads] int64 into the buckets' flattened results, one after the other

    def attend(
        self, query: Tensor, pool: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """As `Attention.attend`; the pool must be float32."""
        queries = query.to(torch.float32).reshape(-1, query.shape[-1])  # [rows * query heads, head_dim]
        flat_query = queries * (scale * LOG2_E)
        flat_pool = pool.view(-1, pool.shape[-1])  # [2 * slots * heads, head_dim]
        parts = [_attend(flat_query, flat_pool, bucket, pool.shape[2], window, softcap) for bucket in self.buckets]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.index_select(0, self.out_members).view(query.shape).to(query.dtype)


def plan_attention(
    rows: AttentionRows,
    slot_table: Tensor,
    *,
    num_slots: int,
    query_heads: int,
    kv_heads: int,
    member_multiple: int,
    padding: int = 0,
) -> Attention:
    """Lay out one forward, on the host, where hundreds of small integer operations cost a tenth of what they cost as
    tensor operations. `slot_table` is [table rows, max positions] int64 and already holds the extend rows. Members are
    padded to `member_multiple`, at which products no longer depend on their number (`exact_rows`). `padding` rows
    follow the rows proper; what they attend to is of no concern. Rows of prompt chunks are planned apart from decoding
    rows: padding a single one to their many members would cost more than the rest of its step."""
    host, heads = _HostRows.of(rows, slot_table), _Heads(query_heads, kv_heads, num_slots, member_multiple)
    chunked = host.in_chunks()
    parts = [part.nonzero()[0] for part in (~chunked, chunked) if part.any()]
    buckets, outs, offset = [], np.zeros((len(host.sequence) + padding, query_heads), np.int64), 0
    for part in parts:
        segments = _segment(host, part, heads)
        buckets.append(_plan_bucket(host, segments, heads, slot_table.device))
        outs[part] = offset + _out_members(segments, heads)
        offset += segments.member_rows.size * kv_heads
    return AttentionPlan(tuple(buckets), torch.from_numpy(outs.reshape(-1)).to(slot_table.device))


def _attend(
    query: Tensor, pool: Tensor, bucket: AttentionBucket, heads: int, window: int | None, softcap: float | None
) -> Tensor:
    """One bucket. query [rows * query heads, head_dim] -> [segments * heads * members, head_dim]"""
    items, dim = bucket.item_segment.shape[0], query.shape[-1]
    queries = query.index_select(0, bucket.item_queries).view(items * heads, -1, dim)
    keys, values = pool.index_select(0, bucket.item_keys).view(2, items * heads, WIDTH, dim).unbind()
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(items, heads, -1, WIDTH)
    if softcap is not None:
        scores = scores.div_(softcap * LOG2_E).tanh_().mul_(softcap * LOG2_E)
    scores.add_(bucket.mask(window))
    weights = scores.sub_(_common_top(scores, bucket)).exp2_()
    totals = _sum_columns(weights, bucket.num_chunks)  # [items, heads, members, 1]
    sums = torch.bmm(weights.view(items * heads, -1, WIDTH), values).view(items, heads, -1, dim)
    if bucket.num_chunks:
        sums, totals = _add_up(sums, bucket), _add_up(totals, bucket)
    return sums.div_(totals).view(-1, dim)


def _common_top(scores: Tensor, bucket: AttentionBucket) -> Tensor:
    """The largest score of each query over all items of its segment. # [items or 1, heads, members, 1]"""
    segments = scores.shape[0] - bucket.num_chunks
    if segments == 1:
        return scores.amax((0, -1), keepdim=True)
    top = scores.amax(-1, keepdim=True)
    if not bucket.num_chunks:
        return top
    common = top.index_select(0, bucket.segment_items).view(segments, -1, *top.shape[1:]).amax(1)
    return common.index_select(0, bucket.item_segment)


def _sum_columns(weights: Tensor, chunks: int) -> Tensor:
    """Softmax denominators per item. A tail's columns are summed one after the other, so that gaps leave no trace; a
    chunk's are the same keys in every step, so any fixed order will do."""
    tail_totals = weights[chunks:].cumsum(-1)[..., -1:]
    return torch.cat([weights[:chunks].sum(-1, keepdim=True), tail_totals]) if chunks else tail_totals


def _add_up(values: Tensor, bucket: AttentionBucket) -> Tensor:
    """Sums over each segment's items: its chunks in order, then its tail. # [items, ...] -> [segments, ...]"""
    items, segments = values.shape[0], values.shape[0] - bucket.num_chunks
    if segments == 1 and items <= _FEW_ITEMS:
        return reduce(torch.add, values.chunk(items))  # the same additions, and cheaper than looking up where they go
    sums = values.new_zeros(segments, *values.shape[1:])
    return sums.index_add_(0, bucket.item_segment, values)


@dataclass(frozen=True, slots=True)
class _Heads:
    query_heads: int
    kv_heads: int
    num_slots: int
    member_multiple: int

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class _HostRows:
    """`AttentionRows` and the slot table as host arrays, same shapes."""

    sequence: Ints
    positions: Ints
    node: Ints
    table_rows: Ints
    extend_end: Ints
    node_slots: Ints
    node_depths: Ints
    ancestors: Bools
    slot_table: Ints

    @staticmethod
    def of(rows: AttentionRows, slot_table: Tensor) -> "_HostRows":
        parts = {part.name: getattr(rows, part.name) for part in fields(rows)} | {"slot_table": slot_table}
        return _HostRows(**{name: _host(value) for name, value in parts.items()})

    def in_chunks(self) -> Bools:
        """Rows whose sequence has more than one extend row. # -> [rows]"""
        extend_rows = np.bincount(self.sequence[self.node < 0], minlength=len(self.table_rows))
        chunked: Bools = (extend_rows > 1)[self.sequence]
        return chunked

    def slots(self, sequence: Ints, positions: Ints) -> Ints:
        """Slots at some positions; beyond the table's end any slot, for the caller to mask."""
        slots: Ints = self.slot_table[self.table_rows[sequence], np.minimum(positions, self.slot_table.shape[1] - 1)]
        return slots


@dataclass(frozen=True, slots=True)
class _Segments:
    """Rows of one bucket gathered by sequence and boundary."""

    sequence: Ints  # [segments]
    boundary: Ints  # [segments], first position of the tail
    of_row: Ints  # [bucket rows], each row's segment
    place: Ints  # [bucket rows, group], each row's members within its segment
    member_rows: Ints  # [segments, members], the row behind each member; padding repeats row 0


def _segment(rows: _HostRows, bucket_rows: Ints, heads: _Heads) -> _Segments:
    span = np.maximum(rows.positions[bucket_rows] - MAX_DEPTH, 0) // SPAN
    sequences = len(rows.table_rows)
    key, of_row, counts = np.unique(
        span * sequences + rows.sequence[bucket_rows], return_inverse=True, return_counts=True
    )
    order = np.argsort(of_row, kind="stable")
    rank = np.empty_like(of_row)
    rank[order] = np.arange(len(of_row)) - np.repeat(counts.cumsum() - counts, counts)
    members = -(-int(counts.max()) * heads.group // heads.member_multiple) * heads.member_multiple
    place = rank[:, None] * heads.group + np.arange(heads.group)
    member_rows = np.zeros((len(key), members), np.int64)
    member_rows[of_row[:, None], place] = bucket_rows[:, None]
    return _Segments(key % sequences, key // sequences * SPAN, of_row, place, member_rows)


def _plan_bucket(rows: _HostRows, segments: _Segments, heads: _Heads, device: torch.device) -> AttentionBucket:
    chunk_segment, chunk_start, segment_items = _chunk_items(segments.boundary)
    chunk_slots, chunk_positions, visible_chunks = _chunk_keys(rows, segments, chunk_segment, chunk_start)
    tail_slots, tail_positions, visible_tails = _tail_keys(rows, segments)
    item_segment = np.concatenate([chunk_segment, np.arange(len(segments.boundary))])

    def tensor(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return AttentionBucket(
        num_chunks=len(chunk_segment),
        item_queries=tensor(_query_indices(segments.member_rows, heads)[item_segment].reshape(-1)),
        item_keys=tensor(_key_indices(np.concatenate([chunk_slots, tail_slots]), heads)),
        item_segment=tensor(item_segment),
        segment_items=tensor(segment_items),
        query_positions=tensor(rows.positions[segments.member_rows]),
        key_positions=tensor(np.concatenate([chunk_positions, tail_positions])),
        visible=tensor(_stacked(visible_chunks, visible_tails)),
    )


def _chunk_items(boundary: Ints) -> tuple[Ints, Ints, Ints]:
    """Which chunks each segment sums over: each chunk's segment [chunks], its first position [chunks], and each
    segment's items [segments * most]."""
    counts = -(-boundary // WIDTH)  # [segments]
    first = counts.cumsum() - counts  # [segments]
    segment = np.repeat(np.arange(len(boundary)), counts)
    start = (np.arange(len(segment)) - first[segment]) * WIDTH
    column = np.arange(counts.max() + 1)
    tail = len(segment) + np.arange(len(boundary))
    items = np.where(column < counts[:, None], first[:, None] + column, tail[:, None])
    return segment, start, items.reshape(-1)


def _chunk_keys(rows: _HostRows, segments: _Segments, segment: Ints, start: Ints) -> tuple[Ints, Ints, Bools]:
    """Slots [chunks, WIDTH], positions [chunks, WIDTH] and visibility [chunks, 1, WIDTH] of prefix chunks."""
    positions = start[:, None] + np.arange(WIDTH)
    visible = positions < segments.boundary[segment][:, None]
    slots = rows.slots(segments.sequence[segment][:, None], positions)
    return np.where(visible, slots, NULL_SLOT), positions, visible[:, None]


def _tail_keys(rows: _HostRows, segments: _Segments) -> tuple[Ints, Ints, Bools]:
    """Slots [segments, WIDTH], positions [segments, WIDTH] and visibility [segments, members, WIDTH] of tails."""
    sequence, extend_end = segments.sequence, rows.extend_end[segments.sequence][:, None]
    committed = segments.boundary[:, None] + np.arange(COMMITTED)  # [segments, COMMITTED]
    present = committed <= extend_end
    slots = np.where(present, rows.slots(sequence[:, None], committed), NULL_SLOT)
    positions, nodes = rows.positions[segments.member_rows], rows.node[segments.member_rows]  # [segments, members]
    on_extend = present[:, None] & (committed[:, None] <= positions[:, :, None])
    on_path = rows.ancestors[sequence[:, None], np.maximum(nodes, 0)] & (nodes >= 0)[:, :, None]
    return (
        np.concatenate([slots, rows.node_slots[sequence]], axis=1),
        np.concatenate([committed, extend_end + rows.node_depths[sequence]], axis=1),
        np.concatenate([on_extend, on_path], axis=2),
    )


def _stacked(chunks: Bools, tails: Bools) -> Bools:
    """Visibility of all items. # [chunks, 1, WIDTH], [segments, members, WIDTH] -> [items, members, WIDTH]"""
    wide = np.broadcast_to(chunks, (len(chunks), *tails.shape[1:]))
    return np.concatenate([wide, tails])


def _query_indices(member_rows: Ints, heads: _Heads) -> Ints:
    """Where each member's query stands in [rows * query heads]. # -> [segments, heads, members]"""
    head = np.arange(heads.kv_heads)[:, None] * heads.group
    within = np.arange(member_rows.shape[1]) % heads.group
    return member_rows[:, None] * heads.query_heads + head + within


def _key_indices(slots: Ints, heads: _Heads) -> Ints:
    """Where each item's keys, then its values, stand in [2 * slots * heads].
    # [items, WIDTH] -> [2 * items * heads * WIDTH]"""
    keys = (slots[:, None] * heads.kv_heads + np.arange(heads.kv_heads)[:, None]).reshape(-1)
    return np.concatenate([keys, keys + heads.num_slots * heads.kv_heads])


def _out_members(segments: _Segments, heads: _Heads) -> Ints:
    """Where each row's results stand in [segments * heads * members]. # -> [bucket rows, query heads]"""
    base = (segments.of_row[:, None] * heads.kv_heads + np.arange(heads.kv_heads)) * segments.member_rows.shape[1]
    members: Ints = (base[:, :, None] + segments.place[:, None]).reshape(len(segments.of_row), -1)
    return members


def _host(values: Tensor) -> NDArray[Any]:
    host: NDArray[Any] = values.cpu().numpy()  # planned transfer: none on a CPU
    return host
