"""The compiled twin of `kernels.tree_attention`: a row's keys are a range of its text's slots, then its path's."""

from ctypes import byref, c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.library import Layer, Rows, address, function, halves
from kernels.tree_attention import LOG2_E, Attention, AttentionRows


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
    (num_rows,), (sequences, nodes) = rows.sequence.shape, rows.node_slots.shape
    order, seen, path_start = (torch.empty(num_rows + more, dtype=torch.int32) for more in (0, 0, 1))
    path_slots = torch.empty(num_rows * nodes, dtype=torch.int64)
    groups = torch.empty(num_rows, 3, dtype=torch.int32)
    given = [value.contiguous() for value in (rows.sequence, rows.positions, rows.node)]
    texts = [value.contiguous() for value in (rows.table_rows, rows.extend_end, rows.node_slots, rows.ancestors)]
    kept = order, seen, path_start, path_slots
    call = function("plan_rows", "pppnppppnnnppppp")
    call.restype = c_int64
    lanes = function("attend_lanes", "")
    lanes.restype = c_int64
    rows_at_once = max(1, lanes() // (query_heads // kv_heads))
    sizes = sequences, nodes, rows_at_once
    count = call(*map(address, given), num_rows, *map(address, texts), *sizes, *map(address, kept), groups.data_ptr())
    return CompiledAttention(Rows(*map(address, kept)), groups[:count], slot_table, kept)
