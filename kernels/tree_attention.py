"""Tree attention over slot-addressed keys and values: which row sees which key, and the plain-torch reference.

    out_i = sum_j p_ij v_j,   p_ij = softmax_j(q_i . k_j * scale)   over j in {committed prefix of i} + {its tree path}

With attention sinks (gpt-oss), the softmax of a query head has one more logit, its sink, without a key and a value.

The kernels sum over a row's keys in the order of their positions, grouped by position alone, so that plain decoding,
tree verification and any prompt chunking give equal bits. The reference leaves sums to torch, whose grouping depends on
the shapes of a step: it agrees with the kernels up to rounding.

Legend: rows = tokens of the forward, nodes = number of nodes of the widest tree, keys = keys of one sequence.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

MAX_DEPTH = 64
"""Largest depth of a tree node."""

MAX_NODES = 256
"""Largest number of tree nodes of one sequence in a step."""

LOG2_E = math.log2(math.e)
"""Factor by which kernels scale scores, because they compute exp(x) as exp2(x log2 e)."""

NULL_SLOT = 0
"""The slot that padding reads: never written, always zero."""


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Description of a forward's rows from which attention is planned. A sequence's *extend* rows (a prompt chunk, or
    only the root) are certain to be committed, and their slots are in the slot table; its node rows are a tree below
    the last extend row, parents before children."""

    sequence: Tensor  # [rows] int64, index into the per-sequence tensors below
    positions: Tensor  # [rows] int64, absolute
    node: Tensor  # [rows] int64, node index within the sequence's tree, -1 for extend rows
    table_rows: Tensor  # [sequences] int64, row of the slot table
    extend_end: Tensor  # [sequences] int64, position of the last extend row
    node_slots: Tensor  # [sequences, nodes] int64, NULL_SLOT padded
    node_depths: Tensor  # [sequences, nodes] int64
    ancestors: Tensor  # [sequences, nodes, nodes] bool, [s, i, j]: j is on the path to i, itself included


class AttentionForm(NamedTuple):
    """What differs between layers in attention, besides sizes."""

    scale: float  # factor on the scores before softmax
    window: int | None = None  # number of last positions that a row sees; None: all
    softcap: float | None = None  # scores are bounded to +-softcap by tanh (Gemma 2)
    sinks: Tensor | None = None  # [query heads] float32, logits that are added to the softmax


class Attention(Protocol):
    """The attention of one forward, planned once and run in each layer."""

    def attend(self, query: Tensor, pool: Tensor, form: AttentionForm) -> Tensor:
        """Compute out = softmax(q k^T * scale) v of all rows in one layer.
        # query [rows, query heads, head_dim] in any layout; pool [2, slots, heads, head_dim], the layer's keys and
        values, including those of this forward's rows -> [rows, query heads, head_dim] in the query's type, summed in
        float32; finite even for a padding row that sees no key"""


class KVRows(NamedTuple):
    """The keys and values of a forward's rows in the layers of one KV group."""

    slots: Tensor  # [rows] int64, places to write
    attention: Attention


@dataclass(frozen=True, slots=True)
class SequenceKeys:
    """Keys of one sequence, and which of the sequence's rows see them."""

    rows: Tensor  # [own rows] int64
    slots: Tensor  # [keys] int64, committed keys by position, then tree nodes
    visible: Tensor  # [own rows, keys] bool
    distance: Tensor  # [own rows, keys] int64, positions from the key to the row


@dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """Reference of `Attention`: a masked softmax for each sequence of a forward."""

    sequences: tuple[SequenceKeys, ...]

    def attend(self, query: Tensor, pool: Tensor, form: AttentionForm) -> Tensor:
        """As `Attention.attend`.
        # query [rows, query heads, head_dim]; pool [2, slots, heads, head_dim] -> query"""
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for own in self.sequences:
            queries = query[own.rows].float().unflatten(1, (pool.shape[2], -1))  # [own rows, heads, group, head_dim]
            keys, values = pool[:, own.slots].float()  # [keys, heads, head_dim]
            scores = torch.einsum("rhgd,khd->rhgk", queries, keys) * form.scale
            if form.softcap is not None:
                scores = torch.tanh(scores / form.softcap) * form.softcap
            visible = own.visible if form.window is None else own.visible & (own.distance < form.window)
            hidden = ~visible[:, None, None]
            scores = scores.masked_fill(hidden, -math.inf)
            if form.sinks is not None:
                sink = form.sinks.view(*scores.shape[1:3], 1).expand(len(scores), -1, -1, -1)
                scores = torch.cat([scores, sink], dim=-1)
            weights = functional.softmax(scores, dim=-1)[..., : len(keys)].masked_fill(hidden, 0.0)
            out[own.rows] = torch.einsum("rhgk,khd->rhgd", weights, values).flatten(1, 2).to(out.dtype)
        return out


def plan_attention(rows: AttentionRows, slot_table: Tensor, *, query_heads: int, kv_heads: int) -> Attention:
    """Plan the attention of one forward, for all layers. Kernels choose tile sizes by the numbers of heads.
    # slot_table [table rows, max positions] int64, which already contains the slots of extend rows"""
    sequences = rows.sequence.unique().tolist()  # planned transfer: kernels compute on devices
    return ReferenceAttention(tuple(_keys_of(sequence, rows, slot_table) for sequence in sequences))


def _keys_of(sequence: int, rows: AttentionRows, slot_table: Tensor) -> SequenceKeys:
    (own,) = (rows.sequence == sequence).nonzero(as_tuple=True)
    known = int(rows.extend_end[sequence]) + 1
    committed = torch.arange(known, device=own.device)
    positions = torch.cat([committed, known - 1 + rows.node_depths[sequence]])
    is_node = (rows.node[own] >= 0)[:, None]
    on_path = rows.ancestors[sequence][rows.node[own]] & is_node if rows.ancestors.shape[1] else is_node[:, :0]
    in_prefix = is_node | (committed <= rows.positions[own, None])
    return SequenceKeys(
        rows=own,
        slots=torch.cat([slot_table[rows.table_rows[sequence], :known], rows.node_slots[sequence]]),
        visible=torch.cat([in_prefix, on_path], dim=1),
        distance=rows.positions[own, None] - positions,
    )
