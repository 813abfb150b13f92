"""KV cache: the pool of keys and values addressed by slot ids, the free slots, and the slot table of running sequences.

Committing a token writes its slot id into the table; keys and values are never moved within the pool.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.library import pool_memory
from kernels.tree_attention import NULL_SLOT
from service.errors import StartupError


@dataclass(frozen=True, slots=True)
class KVShape:
    """Size and type of one token's keys and values."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """Storage of all layers' keys and values. # [layers, 2, slots + 1 + scratch, kv_heads, head_dim]

    The place after the slots is written by padding rows and never read. It is followed by scratch places for the trees
    of a drafter that runs these layers.
    """

    def __init__(self, shape: KVShape, num_slots: int, device: torch.device, *, scratch: int = 0) -> None:
        """`scratch`: number of scratch places for a drafter's trees."""
        self.num_slots = num_slots
        self.shape = shape
        size = (shape.num_layers, 2, num_slots + 1 + scratch, shape.kv_heads, shape.head_dim)
        self.scratch = torch.arange(num_slots + 1, num_slots + 1 + scratch, device=device)  # [scratch] int64
        self.storage = pool_memory(size, shape.dtype, device)
        self._users: dict[range, object] = {}
        self._layers = self.storage.unbind()

    def use(self, user: object, slots: range) -> bool:
        """Let `user` write to these slots from now on. Returns whether another user, or none, wrote to them before, so
        that they hold nothing of `user`."""
        if self._users.get(slots) is user:
            return False
        self._users = {
            held: who for held, who in self._users.items() if held.stop <= slots.start or slots.stop <= held.start
        } | {slots: user}
        return True

    def refuse_other_shape(self, keys: Tensor, values: Tensor) -> None:
        """Raise StartupError if keys or values do not have the configured shape.
        # keys, values [1, kv_heads, rows, head_dim]"""
        expected = (self.shape.kv_heads, self.shape.head_dim)
        found = {(tensor.shape[1], tensor.shape[-1]) for tensor in (keys, values)}
        if found != {expected}:
            raise StartupError(
                f"this model's keys and values have the shape (heads, dimensions) {sorted(found)}, but its "
                f"configuration says {expected}; adaptree cannot run it"
            )

    @property
    def unread_slot(self) -> int:
        """Index of the place that padding rows write to, after all slots."""
        return self.num_slots

    def layer(self, index: int) -> Tensor:
        """One layer's keys and values. # [2, places, kv_heads, head_dim]"""
        return self._layers[index]

    def write(self, index: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of rows in layer `index`.
        # slots [rows] int64; keys, values [rows, kv_heads, head_dim]"""
        for kept, new in zip(self._layers[index], (keys, values), strict=True):
            kept.index_copy_(0, slots, new.to(kept.dtype))


class SlotPool:
    """Allocator of slots, with the free ones on a stack. Slot 0 is the null slot, which padding reads; it is never
    allocated."""

    def __init__(self, num_slots: int, device: torch.device, *, first: int = NULL_SLOT + 1) -> None:
        """`num_slots`: number of slots including the null slot; `first`: lowest slot to allocate."""
        self.capacity = num_slots - 1
        self.owned = range(first, first + self.capacity)
        self._stack = torch.arange(self.owned.stop - 1, first - 1, -1, device=device)  # [capacity]
        self.num_free = self.capacity

    def allocate(self, count: int) -> Tensor:
        """Allocate `count` slots; the caller checks that as many are free. # -> [count] int64"""
        assert count <= self.num_free, f"{count} slots requested, {self.num_free} free"
        self.num_free -= count
        return self._stack.narrow_copy(0, self.num_free, count)

    def free(self, slots: Tensor) -> None:
        """Return slots to the pool. # [count] int64"""
        count = slots.shape[0]
        self._stack[self.num_free : self.num_free + count] = slots
        self.num_free += count
        assert self.num_free <= self.capacity, "a slot was freed twice"

    def free_slots(self) -> Tensor:
        """Copy the list of free slots, for conservation checks. # -> [num_free] int64"""
        return self._stack[: self.num_free].clone()


class SlotTable:
    """Slots of the committed positions of running sequences, one row each. # [max_sequences, max_length] int64"""

    def __init__(self, max_sequences: int, max_length: int, device: torch.device) -> None:
        self.slots = torch.full((max_sequences, max_length), NULL_SLOT, dtype=torch.int64, device=device)
        self._free_rows = list(range(max_sequences - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        """Number of rows that are free for further running sequences."""
        return len(self._free_rows)

    def take_row(self) -> int:
        """Take a row for a sequence that starts to run."""
        return self._free_rows.pop()

    def release_row(self, row: int, length: int) -> Tensor:
        """Release a row. Returns the slots of its first `length` positions, which the caller must free.
        # -> [length] int64"""
        slots = self.slots[row, :length].clone()
        self.slots[row, :length] = NULL_SLOT
        self._free_rows.append(row)
        return slots
