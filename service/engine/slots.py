"""Who owns which slot of the key/value pools: a free list, and one table line of slot ids per running sequence.

Committing a token moves its slot id into the table; nothing is ever copied inside the pools.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.tree_attention import NULL_SLOT


class SlotPool:
    """Free slots as a stack. Slot 0 is the null slot that padding reads; it is never handed out."""

    def __init__(self, num_slots: int, device: torch.device, *, first: int = NULL_SLOT + 1) -> None:
        """`num_slots` counts the null slot, wherever the others begin."""
        self.capacity = num_slots - 1
        self.mine = range(first, first + self.capacity)
        self._stack = torch.arange(self.mine.stop - 1, first - 1, -1, device=device)  # [capacity]
        self.num_free = self.capacity

    def allocate(self, count: int) -> Tensor:
        """`count` free slots. # -> [count] int64"""
        assert count <= self.num_free, f"{count} slots asked for, {self.num_free} free"
        self.num_free -= count
        return self._stack[self.num_free : self.num_free + count].clone()

    def free(self, slots: Tensor) -> None:
        """Take slots back. # [count] int64"""
        count = slots.shape[0]
        self._stack[self.num_free : self.num_free + count] = slots
        self.num_free += count
        assert self.num_free <= self.capacity, "a slot was freed twice"

    def free_slots(self) -> Tensor:
        """The slots that are free now, for conservation checks. # [num_free] int64"""
        return self._stack[: self.num_free].clone()


class SlotTable:
    """Which slot holds each committed position of each running sequence."""

    def __init__(self, max_sequences: int, max_length: int, device: torch.device) -> None:
        self.slots = torch.full((max_sequences, max_length), NULL_SLOT, dtype=torch.int64, device=device)
        self._free_rows = list(range(max_sequences - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def take_row(self) -> int:
        """A line for a sequence that starts to run."""
        return self._free_rows.pop()

    def release_row(self, row: int, length: int) -> Tensor:
        """Give a line back; returns the slots of its first `length` positions, to be freed. # -> [length] int64"""
        slots = self.slots[row, :length].clone()
        self.slots[row, :length] = NULL_SLOT
        self._free_rows.append(row)
        return slots

    def write(self, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Record slots of positions that are certain to be committed. # all [count] int64"""
        self.slots[rows, positions] = slots

    def used(self, lengths: Sequence[tuple[int, int]]) -> Tensor:
        """Slots of the given (row, length) pairs, for conservation checks. # -> [total] int64"""
        return torch.cat([self.slots[row, :length] for row, length in lengths]) if lengths else self.slots.new_empty(0)
