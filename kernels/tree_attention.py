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

from dataclasses import dataclass, field

import torch
from torch import Tensor

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

MEMBER_MULTIPLE = 8
"""Rows of an fp32 product are padded to a multiple of this, below which BLAS libraries switch kernels."""

MASKED = -1e30
"""Additive mask; finite, so that a fully masked item has weight exp(MASKED - max) = 0 instead of NaN."""

NULL_SLOT = 0
"""The slot that padding reads: never written, always zero."""


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """What the layout needs to know of a forward's rows; rows of one sequence are adjacent.

    A sequence's *chain* rows (a prompt chunk, or just the root) are certain to be committed and already stand in the
    slot table; its node rows hang below the last chain row.
    """

    sequence: Tensor  # [rows] int64, index into the per-sequence tensors below
    positions: Tensor  # [rows] int64, absolute
    node: Tensor  # [rows] int64, node index within the sequence's tree, -1 for chain rows
    table_rows: Tensor  # [sequences] int64, line of the slot table
    chain_end: Tensor  # [sequences] int64, position of the last chain row
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
    out_rows: Tensor  # [rows of the bucket * query heads] int64 into flattened [rows * query heads]
    out_members: Tensor  # [same] int64 into flattened [segments * heads * members]
    query_positions: Tensor  # [segments, members] int64
    key_positions: Tensor  # [items, WIDTH] int64
    visible_chunks: Tensor  # [chunks, 1, WIDTH] bool
    visible_tails: Tensor  # [segments, members, WIDTH] bool
    masks: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def mask(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Additive masks of chunks and tails for a sliding window (None = unlimited), made at first use in a step."""
        if window not in self.masks:
            chunks, tails = self.visible_chunks, self.visible_tails
            if window is not None:
                near = self.key_positions[:, None] > (self.query_positions[self.item_segment] - window)[:, :, None]
                chunks, tails = chunks & near[: self.num_chunks], tails & near[self.num_chunks :]
            self.masks[window] = _additive(chunks), _additive(tails)
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one forward's rows attend: a bucket for decoding rows and one for prompt chunks, as far as present."""

    buckets: tuple[AttentionBucket, ...]


def plan_attention(
    rows: AttentionRows, slot_table: Tensor, *, num_slots: int, query_heads: int, kv_heads: int
) -> AttentionPlan:
    """Lay out one forward. `slot_table` is [table rows, max positions] int64 and already holds the chain rows.

    Rows of prompt chunks are planned apart from decoding rows: their segments have many members, and padding a single
    decoding row to that size would cost more than the rest of its step.
    """
    chain_rows = torch.bincount(rows.sequence[rows.node < 0], minlength=rows.table_rows.shape[0])
    chunked = (chain_rows > 1)[rows.sequence]
    parts = [part for part in (~chunked, chunked) if bool(part.any())]
    heads = _Heads(query_heads, kv_heads, num_slots)
    return AttentionPlan(tuple(_plan_bucket(rows, part.nonzero()[:, 0], slot_table, heads) for part in parts))


def tree_attention(
    query: Tensor, pool: Tensor, plan: AttentionPlan, *, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """Attend all rows of a forward.

    query [rows, query heads, head_dim] float32, already scaled; pool [2, slots, heads, head_dim] float32, one layer's
    keys and values with this forward's rows written; returns [rows, query heads, head_dim] float32, zero for rows in
    no bucket (padding).
    `softcap` bounds scores to +-softcap by tanh (Gemma 2).
    """
    flat_query = query.reshape(-1, query.shape[-1])  # [rows * query heads, head_dim]
    flat_pool = pool.view(-1, pool.shape[-1])  # [2 * slots * heads, head_dim]
    out = torch.zeros_like(flat_query)
    for bucket in plan.buckets:
        attended = _attend(flat_query, flat_pool, bucket, pool.shape[2], window, softcap)
        out.index_copy_(0, bucket.out_rows, attended.index_select(0, bucket.out_members))
    return out.view(query.shape)


def _attend(
    query: Tensor, pool: Tensor, bucket: AttentionBucket, heads: int, window: int | None, softcap: float | None
) -> Tensor:
    """One bucket. query [rows * query heads, head_dim] -> [segments * heads * members, head_dim]"""
    items, dim, chunks = bucket.item_segment.shape[0], query.shape[-1], bucket.num_chunks
    queries = query.index_select(0, bucket.item_queries).view(items * heads, -1, dim)
    keys, values = pool.index_select(0, bucket.item_keys).view(2, items * heads, WIDTH, dim)
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(items, heads, -1, WIDTH)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    chunk_mask, tail_mask = bucket.mask(window)
    scores[:chunks] += chunk_mask[:, None]
    scores[chunks:] += tail_mask[:, None]
    top = scores.amax(-1, keepdim=True)  # [items, heads, members, 1]
    weights = scores.sub_(top).exp_()
    totals = _sum_columns(weights, chunks)  # [items, heads, members, 1]
    sums = torch.bmm(weights.view(items * heads, -1, WIDTH), values).view(items, heads, -1, dim)
    if chunks:
        sums, totals = _merge_items(sums, totals, top, bucket)
    return (sums / totals).view(-1, dim)


def _sum_columns(weights: Tensor, chunks: int) -> Tensor:
    """Softmax denominators per item.

    A tail's columns are summed by a product with ones, because only that runs strictly in column order; a chunk's
    columns are the same keys in every step, so any fixed order will do.
    """
    totals = weights.sum(-1, keepdim=True)
    tails = weights[chunks:]
    ones = torch.ones(WIDTH, MEMBER_MULTIPLE, dtype=weights.dtype, device=weights.device)
    totals[chunks:] = (tails.reshape(-1, WIDTH) @ ones)[:, :1].view(*tails.shape[:-1], 1)
    return totals


def _merge_items(sums: Tensor, totals: Tensor, top: Tensor, bucket: AttentionBucket) -> tuple[Tensor, Tensor]:
    """Add up each segment's items, chunk by chunk and then the tail, after rescaling them to a common maximum."""
    segments = sums.shape[0] - bucket.num_chunks
    common = top.index_select(0, bucket.segment_items).view(segments, -1, *top.shape[1:]).amax(1)
    scale = (top - common.index_select(0, bucket.item_segment)).exp_()
    zero_sums, zero_totals = sums.new_zeros(segments, *sums.shape[1:]), totals.new_zeros(segments, *totals.shape[1:])
    return (
        zero_sums.index_add_(0, bucket.item_segment, sums.mul_(scale)),
        zero_totals.index_add_(0, bucket.item_segment, totals.mul_(scale)),
    )


@dataclass(frozen=True, slots=True)
class _Heads:
    query_heads: int
    kv_heads: int
    num_slots: int

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class _Segments:
    """Rows of one bucket gathered by sequence and boundary."""

    sequence: Tensor  # [segments]
    boundary: Tensor  # [segments], first position of the tail
    of_row: Tensor  # [bucket rows], each row's segment
    place: Tensor  # [bucket rows, group], each row's members within its segment
    member_rows: Tensor  # [segments, members], the row behind each member; padding repeats row 0


def _plan_bucket(rows: AttentionRows, bucket_rows: Tensor, slot_table: Tensor, heads: _Heads) -> AttentionBucket:
    """Segments, items and index tensors for the given rows. # bucket_rows [bucket rows] int64"""
    segments = _segment(rows, bucket_rows, heads.group)
    chunk_segment, chunk_start, segment_items = _chunk_items(segments.boundary)
    chunk_slots, chunk_positions, visible_chunks = _chunk_keys(
        slot_table, rows.table_rows[segments.sequence[chunk_segment]], chunk_start, segments.boundary[chunk_segment]
    )
    tail_slots, tail_positions, visible_tails = _tail_keys(rows, slot_table, segments)
    item_segment = torch.cat([chunk_segment, torch.arange(segments.boundary.shape[0], device=slot_table.device)])
    out_rows, out_members = _out_indices(bucket_rows, segments, heads)
    return AttentionBucket(
        num_chunks=chunk_segment.shape[0],
        item_queries=_query_indices(segments.member_rows, heads)[item_segment].reshape(-1),
        item_keys=_key_indices(torch.cat([chunk_slots, tail_slots]), heads),
        item_segment=item_segment,
        segment_items=segment_items,
        out_rows=out_rows,
        out_members=out_members,
        query_positions=rows.positions[segments.member_rows],
        key_positions=torch.cat([chunk_positions, tail_positions]),
        visible_chunks=visible_chunks,
        visible_tails=visible_tails,
    )


def _segment(rows: AttentionRows, bucket_rows: Tensor, group: int) -> _Segments:
    positions, sequence = rows.positions[bucket_rows], rows.sequence[bucket_rows]
    span = (positions - MAX_DEPTH).clamp(min=0) // SPAN
    sequences = rows.table_rows.shape[0]
    key, of_row, counts = torch.unique(span * sequences + sequence, return_inverse=True, return_counts=True)
    order = torch.argsort(of_row, stable=True)
    first = counts.cumsum(0) - counts
    rank = torch.empty_like(of_row)
    rank[order] = torch.arange(of_row.shape[0], device=rank.device) - first[of_row[order]]
    members = -(-int(counts.max()) * group // MEMBER_MULTIPLE) * MEMBER_MULTIPLE
    place = rank[:, None] * group + torch.arange(group, device=rank.device)
    member_rows = torch.zeros(key.shape[0], members, dtype=torch.int64, device=rank.device)
    member_rows[of_row[:, None], place] = bucket_rows[:, None]
    return _Segments(key % sequences, key // sequences * SPAN, of_row, place, member_rows)


def _chunk_items(boundary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which chunks each segment sums over.

    Returns each chunk's segment [chunks], its first position [chunks], and each segment's items [segments * most].
    """
    counts = -(-boundary // WIDTH)  # [segments]
    segment = torch.repeat_interleave(counts)
    first = counts.cumsum(0) - counts  # [segments]
    ordinal = torch.arange(segment.shape[0], device=boundary.device) - first[segment]
    tail = segment.shape[0] + torch.arange(boundary.shape[0], device=boundary.device)
    column = torch.arange(int(counts.max()) + 1, device=boundary.device)
    items = torch.where(column < counts[:, None], first[:, None] + column, tail[:, None])
    return segment, ordinal * WIDTH, items.reshape(-1)


def _chunk_keys(
    slot_table: Tensor, table_rows: Tensor, start: Tensor, boundary: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots [chunks, WIDTH], positions [chunks, WIDTH] and visibility [chunks, 1, WIDTH] of prefix chunks."""
    positions = start[:, None] + torch.arange(WIDTH, device=start.device)
    visible = positions < boundary[:, None]
    slots = slot_table[table_rows[:, None], positions.clamp(max=slot_table.shape[1] - 1)]
    return slots.masked_fill(~visible, NULL_SLOT), positions, visible[:, None]


def _tail_keys(rows: AttentionRows, slot_table: Tensor, segments: _Segments) -> tuple[Tensor, Tensor, Tensor]:
    """Slots [segments, WIDTH], positions [segments, WIDTH] and visibility [segments, members, WIDTH] of tails."""
    sequence, chain_end = segments.sequence, rows.chain_end[segments.sequence]
    committed = segments.boundary[:, None] + torch.arange(COMMITTED, device=slot_table.device)  # [segments, COMMITTED]
    present = committed <= chain_end[:, None]
    table_rows = rows.table_rows[sequence][:, None]
    slots = slot_table[table_rows, committed.clamp(max=slot_table.shape[1] - 1)].masked_fill(~present, NULL_SLOT)
    query_positions, query_nodes = rows.positions[segments.member_rows], rows.node[segments.member_rows]
    on_chain = present[:, None] & (committed[:, None] <= query_positions[:, :, None])
    on_path = rows.ancestors[sequence[:, None], query_nodes.clamp(min=0)] & (query_nodes >= 0)[:, :, None]
    node_positions = chain_end[:, None] + rows.node_depths[sequence]
    return (
        torch.cat([slots, rows.node_slots[sequence]], dim=1),
        torch.cat([committed, node_positions], dim=1),
        torch.cat([on_chain, on_path], dim=2),
    )


def _query_indices(member_rows: Tensor, heads: _Heads) -> Tensor:
    """Where each member's query stands in [rows * query heads]. # -> [segments, heads, members]"""
    head = torch.arange(heads.kv_heads, device=member_rows.device)[:, None] * heads.group
    within = torch.arange(member_rows.shape[1], device=member_rows.device) % heads.group
    return member_rows[:, None] * heads.query_heads + head + within


def _key_indices(slots: Tensor, heads: _Heads) -> Tensor:
    """Where each item's keys, then its values, stand in [2 * slots * heads].

    [items, WIDTH] -> [2 * items * heads * WIDTH]
    """
    head = torch.arange(heads.kv_heads, device=slots.device)[:, None]
    keys = (slots[:, None] * heads.kv_heads + head).reshape(-1)
    return torch.cat([keys, keys + heads.num_slots * heads.kv_heads])


def _out_indices(bucket_rows: Tensor, segments: _Segments, heads: _Heads) -> tuple[Tensor, Tensor]:
    """Pairs of places in [rows * query heads] and in [segments * heads * members] that hold the same result."""
    head = torch.arange(heads.kv_heads, device=bucket_rows.device)[:, None]
    within = torch.arange(heads.group, device=bucket_rows.device)
    rows = bucket_rows[:, None, None] * heads.query_heads + head * heads.group + within
    members = (segments.of_row[:, None, None] * heads.kv_heads + head) * segments.member_rows.shape[1]
    return rows.reshape(-1), (members + segments.place[:, None]).reshape(-1)


def _additive(visible: Tensor) -> Tensor:
    return torch.where(visible, 0.0, MASKED)
