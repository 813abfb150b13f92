"""KV cache: the pool of keys and values addressed by slot ids, the free slots, and the slot table of running sequences.

Committing a token writes its slot id into the table; keys and values are never moved within the pool.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.library import pool_memory
from kernels.tree_attention import NULL_SLOT, Attention, AttentionRows, KVRows
from service.errors import StartupError


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one token in one layer."""

    kv_heads: int
    dim: int
    window: int | None = None  # last positions that the layer sees; None: all
    source: int | None = None  # earlier layer whose keys and values this one reads; None: it has its own


@dataclass(frozen=True, slots=True)
class KVShape:
    """Size and type of one token's keys and values. There are two KV groups: layers without a window, and layers with
    one."""

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        own = sum(layer.kv_heads * layer.dim for layer in self.layers if layer.source is None)
        return 2 * own * self.dtype.itemsize

    @property
    def window(self) -> int | None:
        """Largest window of a layer; None if no layer has one."""
        return max((layer.window for layer in self.layers if layer.window is not None), default=None)

    def least_heads(self, *, windowed: bool) -> int | None:
        """Smallest number of key heads in the layers of one KV group; None if it has no layers."""
        group = [layer.kv_heads for layer in self.layers if (layer.window is not None) == windowed]
        return min(group, default=None)


Plan = Callable[[AttentionRows, Tensor, int], Attention]
"""Plans the attention of rows over a slot table [table rows, positions] for so many key heads."""


class KVPool:
    """Storage of keys and values: a tensor for each layer that has its own. # [2, slots + 1 + scratch, kv_heads, dim]

    The place after the slots is written by padding rows and never read. It is followed by scratch places for the trees
    of a drafter that runs these layers.
    """

    def __init__(self, shape: KVShape, num_slots: int, device: torch.device, *, scratch: int = 0) -> None:
        """`scratch`: number of scratch places for a drafter's trees."""
        self.num_slots = num_slots
        self.shape, self.device = shape, device
        places = num_slots + 1 + scratch
        self.scratch = torch.arange(num_slots + 1, places, device=device)  # [scratch] int64
        self._users: dict[range, object] = {}
        self.layers: list[Tensor] = []  # by layer; [2, places, kv_heads, dim] each
        for layer in shape.layers:
            size = 2, places, layer.kv_heads, layer.dim
            own = pool_memory(size, shape.dtype, device) if layer.source is None else self.layers[layer.source]
            self.layers.append(own)

    def use(self, user: object, slots: range) -> bool:
        """Let `user` write to these slots from now on. Returns whether another user, or none, wrote to them before, so
        that they hold nothing of `user`."""
        if self._users.get(slots) is user:
            return False
        self._users = {
            held: who for held, who in self._users.items() if held.stop <= slots.start or slots.stop <= held.start
        } | {slots: user}
        return True

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers' keys and values."""
        return sum(
            own.nbytes for own, layer in zip(self.layers, self.shape.layers, strict=True) if layer.source is None
        )

    def refuse_other_shape(self, index: int, keys: Tensor, values: Tensor, window: int | None) -> None:
        """Raise StartupError if keys or values of layer `index`, or its window, are not as configured.
        # keys, values [1, kv_heads, rows, dim]"""
        layer = self.shape.layers[index]
        expected = layer.kv_heads, layer.dim, layer.window or 0
        found = {(tensor.shape[1], tensor.shape[-1], window or 0) for tensor in (keys, values)}
        if found != {expected}:
            raise StartupError(
                f"this model's keys and values have the shape (heads, dimensions, window or 0) {sorted(found)}, but "
                f"its configuration says {expected}; adaptree cannot run it"
            )

    def groups(self, rows: AttentionRows, slots: Tensor, table: Tensor, plan: Plan) -> tuple[KVRows, ...]:
        """Plan a forward's rows for each KV group. # slots [rows], table [table rows, positions] int64"""
        full, windowed = (self.shape.least_heads(windowed=which) for which in (False, True))
        planned = {heads: plan(rows, table, heads) for heads in (full, windowed) if heads is not None}
        return tuple(KVRows(slots, planned[heads]) for heads in (full, windowed) if heads is not None)

    @property
    def unread_slot(self) -> int:
        """Index of the place that padding rows write to, after all slots."""
        return self.num_slots

    def layer(self, index: int) -> Tensor:
        """The keys and values that a layer reads. # [2, places, kv_heads, dim]"""
        return self.layers[index]

    def write(self, index: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of rows in layer `index`, unless it reads those of another.
        # slots [rows] int64; keys, values [rows, kv_heads, dim]"""
        if self.shape.layers[index].source is None:
            for kept, new in zip(self.layers[index], (keys, values), strict=True):
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
