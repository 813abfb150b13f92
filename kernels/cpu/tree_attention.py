"""Compiled op of `kernels.tree_attention`. A row's keys are a range of its sequence's slots, followed by the slots of
its tree path."""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from kernels.cpu.library import CStruct, call, contiguous, halves
from kernels.tree_attention import LOG2_E, Attention, AttentionForm, AttentionRows


@dataclass(frozen=True, slots=True)
class CompiledAttention:
    """The attention of one forward, planned for the compiled kernels."""

    rows: CStruct  # `Rows` of ops.h
    groups: Tensor  # [groups, 3] int32: index of the first row in the order, number of rows, row of the slot table
    slot_table: Tensor  # [table rows, max positions] int64

    @property
    def groups_and_table(self) -> tuple[Tensor, int, Tensor, int]:
        """Arguments of the C functions: groups [groups, 3], number of groups, slot table [table rows, max positions],
        and width of the table."""
        return self.groups, self.groups.shape[0], self.slot_table, self.slot_table.shape[1]

    def attend(self, query: Tensor, pool: Tensor, form: AttentionForm) -> Tensor:
        """Compute `Attention.attend`, in the pool's type.
        # query [rows, query heads, dim]; pool [2, slots, kv_heads, dim] -> like query"""
        given, layer = query.contiguous().to(pool.dtype), layer_of(pool, query.shape[1], form)
        out = torch.empty_like(given)
        call("attend", layer, self.rows, *self.groups_and_table, given, out, dtype=pool.dtype)
        return out.to(query.dtype)


def layer_of(pool: Tensor, query_heads: int, form: AttentionForm) -> CStruct:
    """Build the C structure `Layer` of ops.h. # pool [2, slots, kv_heads, dim]"""
    sinks = form.sinks
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()), "kernels read float32"
    words = query_heads, *pool.shape[2:], form.window or 0, 0 if sinks is None else sinks.data_ptr()
    return _layer((*halves(pool), *words), form.scale, form.softcap)


@lru_cache(maxsize=256)  # at least the layers of a forward
def _layer(words: tuple[int, ...], scale: float, softcap: float | None) -> CStruct:
    return CStruct(*words, floats=(scale * LOG2_E, (softcap or 0.0) * LOG2_E))


@dataclass(frozen=True, slots=True)
class PlannedRows(AttentionRows):
    """Rows whose tensors stay where they are, with the calls that plan their attention."""

    plans: "dict[int, _Plan]" = field(default_factory=dict)  # by query heads per head


class _Plan:
    """Plans the attention of rows into buffers of its own."""

    def __init__(self, rows: AttentionRows, slot_table: Tensor, query_heads: int) -> None:
        """`query_heads`: for each head of keys and values."""
        (num_rows,), (sequences, nodes) = rows.sequence.shape, rows.node_slots.shape
        order, seen, path_start = (torch.empty(num_rows + more, dtype=torch.int32) for more in (0, 0, 1))
        self._groups = torch.empty(num_rows, 3, dtype=torch.int32)
        written = CStruct(order, seen, path_start, torch.empty(num_rows * nodes, dtype=torch.int64))
        by_row = contiguous(rows.sequence, rows.positions, rows.node)
        by_sequence = contiguous(rows.table_rows, rows.extend_end, rows.node_slots, rows.ancestors)
        rows_at_once = max(1, call("attend_lanes") // query_heads)
        sizes = sequences, nodes, rows_at_once
        self._given = *by_row, num_rows, *by_sequence, *sizes, *written.words, self._groups
        self.slot_table = slot_table
        self._planned = CompiledAttention(written, self._groups, slot_table)

    def __call__(self) -> CompiledAttention:
        """Plan the rows as they are now."""
        count = call("plan_rows", *self._given)
        if count != len(self._planned.groups):
            self._planned = replace(self._planned, groups=self._groups[:count])
        return self._planned


def plan_attention(rows: AttentionRows, slot_table: Tensor, *, query_heads: int, kv_heads: int) -> Attention:
    """Same as the reference op; of `PlannedRows`, the next call overwrites the result.
    # slot_table [table rows, max positions]"""
    group = query_heads // kv_heads
    plans = rows.plans if isinstance(rows, PlannedRows) else {}
    plan = plans.get(group)
    if plan is None or plan.slot_table is not slot_table:
        plan = plans[group] = _Plan(rows, slot_table, group)
    return plan()
