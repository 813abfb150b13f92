"""Slots of the target as a drafter with keys and values of its own sees them."""

import torch
from torch import Tensor

from kernels.tree_attention import NULL_SLOT


class HeldSlots:
    """In which slots lies what a drafter itself has run. A slot can come with a text that another sequence has left:
    what was never run there must not be read."""

    def __init__(self, num_slots: int, device: torch.device | str) -> None:
        self.table = torch.zeros(num_slots, dtype=torch.bool, device=device)

    def forget(self, slots: Tensor) -> None:
        """These slots hold other positions from now on, whose entries are still to be run. # [...] int64"""
        self.table.index_fill_(0, slots.flatten(), False)

    def forget_all(self) -> None:
        self.table.zero_()

    def hold(self, slots: Tensor) -> None:
        """Their entries are run in the forward that follows at once. # [...] int64"""
        self.table.index_fill_(0, slots.flatten(), True)

    def holds(self, slots: Tensor) -> Tensor:
        """Whose entries can be read. # [...] int64 -> [...] bool"""
        return self.table[slots]


def taken_slots(slots: Tensor, counts: Tensor) -> Tensor:
    """Those that hold a position, NULL_SLOT for the others. # slots [batch, count], counts [batch] -> like slots"""
    return slots.where(torch.arange(slots.shape[1], device=slots.device) < counts[:, None], NULL_SLOT)
