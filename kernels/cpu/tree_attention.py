"""The compiled twin of `kernels.tree_attention`: a row's keys are a range of its text's slots, then its path's."""

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.library import Layer, Rows, address, function, halves
from kernels.tree_attention import LOG2_E, Attention, AttentionRows

_LANES = 16  # queries that are computed side by side, as in vector.h


@dataclass(frozen=True, slots=True)
class CompiledAttention:
    """How one forward's rows attend, for all layers."""

    rows: Rows
    groups: Tensor  # [groups, 3] int32: first place in the order, number of rows, line of the slot table
    slot_table: Tensor
    kept: tuple[Tensor, ...]  # what `rows` points to

    def attend(
        self, query: Tensor, pool: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """As `Attention.attend`; the pool must be float32."""
        queries = query.contiguous()
        out = torch.empty_like(queries)
        sizes = query.shape[1], pool.shape[2], query.shape[2], window or 0
        layer = Layer(*halves(pool), *sizes, scale * LOG2_E, (softcap or 0.0) * LOG2_E)
        function("attend", "pppnpnppi", query.dtype)(
            byref(layer),
            byref(self.rows),
            self.groups.data_ptr(),
            self.groups.shape[0],
            self.slot_table.data_ptr(),
            self.slot_table.shape[1],
            queries.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def plan_attention(
    rows: AttentionRows,
    slot_table: Tensor,
    *,
    query_heads: int,
    kv_heads: int,
) -> Attention:
    """As the reference."""
    heads = query_heads // kv_heads
    rows_at_once = max(1, _LANES // heads)
    (of_nodes,) = (rows.node >= 0).nonzero(as_tuple=True)
    seen = rows.positions + 1  # [rows]
    seen[of_nodes] = rows.extend_end[rows.sequence[of_nodes]] + 1
    path = rows.ancestors[rows.sequence[of_nodes], rows.node[of_nodes]]  # [node rows, nodes], parents first
    row, node = path.nonzero(as_tuple=True)
    path_slots = rows.node_slots[rows.sequence[of_nodes[row]], node]
    lengths = torch.zeros_like(seen).index_copy_(0, of_nodes, path.sum(1))
    path_start = functional.pad(lengths.cumsum(0), (1, 0))
    order = rows.sequence.argsort(stable=True)
    counts = rows.sequence.bincount(minlength=rows.table_rows.shape[0]).tolist()
    groups, first = [], 0
    for line, count in zip(rows.table_rows.tolist(), counts, strict=True):
        groups += [(first + done, min(rows_at_once, count - done), line) for done in range(0, count, rows_at_once)]
        first += count
    order, seen, path_start = (values.to(torch.int32) for values in (order, seen, path_start))
    kept = (order, seen, path_start, path_slots)
    return CompiledAttention(Rows(*map(address, kept)), torch.tensor(groups, dtype=torch.int32), slot_table, kept)
