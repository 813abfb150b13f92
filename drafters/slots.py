"""Tracks the target's KV slots for which a drafter with a KV pool of its own has computed keys and values."""

import torch
from torch import Tensor

from kernels.tree_attention import NULL_SLOT


class HeldSlots:
    """The set of slots whose current position the drafter has run. A cached prefix has slots of another sequence, and
    the drafter must not read those whose position it never ran."""

    def __init__(self, num_slots: int, device: torch.device | str) -> None:
        self.table = torch.zeros(num_slots, dtype=torch.bool, device=device)

    def forget(self, slots: Tensor) -> None:
        """Mark slots as not run, because they belong to new positions. # slots [...] int64"""
        self.table.index_fill_(0, slots.flatten(), False)

    def forget_all(self) -> None:
        """Mark all slots as not run."""
        self.table.zero_()

    def hold(self, slots: Tensor) -> None:
        """Mark slots as run; the caller must run them at once. # slots [...] int64"""
        self.table.index_fill_(0, slots.flatten(), True)

    def holds(self, slots: Tensor) -> Tensor:
        """Return for each slot whether it was run. # slots [...] int64 -> [...] bool"""
        return self.table[slots]


def taken_slots(slots: Tensor, counts: Tensor) -> Tensor:
    """Return the slots of committed positions, with NULL_SLOT for padding. # slots [batch, count], counts [batch] ->
    like slots"""
    return slots.where(torch.arange(slots.shape[1], device=slots.device) < counts[:, None], NULL_SLOT)
