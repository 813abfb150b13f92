"""KV cache: the pool of keys and values addressed by slot ids, the free slots, and the slot table of running sequences.

Committing a token writes its slot id into the table; keys and values are never moved within the pool. Recurrent layers
have states instead of keys and values (`service.engine.states`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.library import pool_memory
from kernels.recurrence import LayerStates
from kernels.rows import ExtendRows
from kernels.tree_attention import MAX_NODES, NULL_SLOT, Attention, AttentionRows, KVRows
from service.engine.states import NULL_STATE, ONE_PROMPT, StateRoom, States, StateShape
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
    """Size and type of one token's keys and values, and of one sequence's states in recurrent layers. There are two KV
    groups: layers without a window, and layers with one."""

    layers: tuple[LayerKV | StateShape, ...]
    dtype: torch.dtype

    @property
    def attending(self) -> Iterator[LayerKV]:
        """The layers with keys and values."""
        return (layer for layer in self.layers if isinstance(layer, LayerKV))

    @property
    def recurrent(self) -> Iterator[StateShape]:
        """The layers with states."""
        return (layer for layer in self.layers if isinstance(layer, StateShape))

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state of all recurrent layers; 0 if there are none."""
        return sum(layer.num_bytes for layer in self.recurrent)

    def state_bytes(self, room: StateRoom) -> int:
        """Bytes of all states in memory, and of the inputs of two steps' nodes."""
        states = room.num_states * self.bytes_per_state
        return states + 2 * room.nodes * self.dtype.itemsize * sum(layer.input_columns for layer in self.recurrent)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self._bytes_of(self.attending)

    @property
    def bytes_in_windows(self) -> int:
        """The part of `bytes_per_slot` in layers with a window."""
        return self._bytes_of(layer for layer in self.attending if layer.window is not None)

    def _bytes_of(self, layers: Iterable[LayerKV]) -> int:
        return 2 * self.dtype.itemsize * sum(layer.kv_heads * layer.dim for layer in layers if layer.source is None)

    @property
    def window(self) -> int | None:
        """Largest window of a layer; None if no layer has one."""
        return max((layer.window for layer in self.attending if layer.window is not None), default=None)

    def least_heads(self, *, windowed: bool) -> int | None:
        """Smallest number of key heads in the layers of one KV group; None if it has no layers."""
        group = [layer.kv_heads for layer in self.attending if (layer.window is not None) == windowed]
        return min(group, default=None)


Plan = Callable[[AttentionRows, Tensor, int], Attention]
"""Plans the attention of rows over a slot table [table rows, positions] for so many key heads."""


class KVPool:
    """Storage of keys and values: a tensor for each layer that has its own, and the states of each recurrent layer.
    # [2, slots + 1 + scratch, kv_heads, dim]

    The place after the slots is written by padding rows and never read. It is followed by scratch places for the trees
    of a drafter that runs these layers. Layers with a window may have fewer places than there are slots; then
    `window_of` has the place of each slot in them, or NULL_SLOT for positions that no window reaches any more.
    """

    def __init__(
        self,
        shape: KVShape,
        num_slots: int,
        device: torch.device,
        *,
        scratch: int = 0,
        num_places: int | None = None,
        states: StateRoom = ONE_PROMPT,
    ) -> None:
        """`scratch`: number of scratch places for a drafter's trees; `num_places`: places of layers with a window,
        NULL_SLOT included; None: they keep all slots; `states`: numbers of states in recurrent layers."""
        assert not (scratch and num_places), "trees of a drafter need all slots in all layers"
        assert not (scratch and shape.bytes_per_state), "trees of a drafter have no states"
        self.num_slots, self.num_places = num_slots, num_places
        self.shape, self.device = shape, device
        every = num_slots + 1 + scratch
        self.scratch = torch.arange(num_slots + 1, every, device=device)  # [scratch] int64
        self.window_of: Tensor | None = None  # [slots + 1] int64
        if num_places is not None:
            self.window_of = torch.full((every,), NULL_SLOT, dtype=torch.int64, device=device)
            self.window_of[num_slots] = num_places
        self._heads = shape.least_heads(windowed=False), shape.least_heads(windowed=True)
        self._users: dict[range, object] = {}
        self._shared = range(NULL_SLOT + 1, num_slots) if shape.bytes_per_state else None  # slots of each user
        self.states = states
        self.layers: list[Tensor | LayerStates] = []  # by layer; [2, places, kv_heads, dim] each
        for layer in shape.layers:
            if isinstance(layer, StateShape):
                self.layers.append(states.layer(layer, shape.dtype, device))
                continue
            size = 2, every if layer.window is None or not num_places else num_places + 1, layer.kv_heads, layer.dim
            own = pool_memory(size, shape.dtype, device) if layer.source is None else self.layers[layer.source]
            self.layers.append(own)

    def use(self, user: object, slots: range) -> bool:
        """Let `user` write to these slots from now on. Returns whether another user, or none, wrote to them before, so
        that they hold nothing of `user`. All users of a pool share its states, and so each has all slots."""
        slots = self._shared or slots
        if self._users.get(slots) is user:
            return False
        self._users = {
            held: who for held, who in self._users.items() if held.stop <= slots.start or slots.stop <= held.start
        } | {slots: user}
        return True

    def refuse_other_shape(self, index: int, keys: Tensor, values: Tensor, window: int | None) -> None:
        """Raise StartupError if keys or values of layer `index`, or its window, are not as configured.
        # keys, values [1, kv_heads, rows, dim]"""
        layer = self.shape.layers[index]
        assert isinstance(layer, LayerKV), "the model attends in its recurrent layers"
        expected = layer.kv_heads, layer.dim, layer.window or 0
        found = {(tensor.shape[1], tensor.shape[-1], window or 0) for tensor in (keys, values)}
        if found != {expected}:
            raise StartupError(
                f"this model's keys and values have the shape (heads, dimensions, window or 0) {sorted(found)}, but "
                f"its configuration says {expected}; adaptree cannot run it"
            )

    def groups(self, rows: AttentionRows, slots: Tensor, table: Tensor, plan: Plan) -> tuple[KVRows, ...]:
        """Plan a forward's rows for each KV group. # slots [rows], table [table rows, positions] int64"""
        full, windowed = self._heads
        groups = [] if full is None else [KVRows(slots, plan(rows, table, full))]
        if windowed is None:
            return tuple(groups)
        if self.window_of is None:
            return *groups, groups[0] if windowed == full else KVRows(slots, plan(rows, table, windowed))
        nodes, lines = self.window_of[rows.node_slots], torch.arange(len(rows.table_rows), device=self.device)
        tree = rows.extend_end, nodes, rows.node_depths, rows.ancestors
        moved = AttentionRows(rows.sequence, rows.positions, rows.node, lines, *tree)
        attention = plan(moved, self.window_of[table[rows.table_rows]], windowed)
        return *groups, KVRows(self.window_of[slots], attention)

    def allocator(self, num_slots: int | None = None, first: int = NULL_SLOT + 1) -> "SlotPool":
        """Return the allocator of `num_slots` slots from `first` on, NULL_SLOT included in their number, by default of
        all, with their share of the places of layers with a window."""
        count, share = num_slots or self.num_slots, self.num_places
        if share is None:
            return SlotPool(count, self.device, first=first)
        begin, end = ((slot - 1) * (share - 1) // (self.num_slots - 1) + 1 for slot in (first, first + count - 1))
        assert self.window_of is not None
        assert self.shape.window is not None, "no layer has a window"
        places = SlotPool(end - begin + 1, self.device, first=begin)
        return SlotPool(count, self.device, first=first, windows=Windows(self.window_of, places, self.shape.window))

    def least_slots(self, length: int, nodes: int) -> int:
        """Fewest slots of an engine that runs a sequence of this length with a tree of so many nodes."""
        places = min(length, self.shape.window or 0) + nodes + 2
        least = length + nodes + 1
        return least if self.num_places is None else max(least, -(-places * self.num_slots // self.num_places) + 1)

    def longest(self, sequences: int, rows: int) -> int:
        """Largest context that each of `sequences` sequences can have beside `rows` further rows."""
        longest = (self.num_slots - 1 - rows) // sequences
        left, window = (self.num_places or 0) - 1 - rows, self.shape.window or 0
        fits = self.num_places is None or left >= sequences * (window + PASSED_AT_ONCE)
        return longest if fits else min(longest, left // sequences)

    @property
    def unread_slot(self) -> int:
        """Index of the place that padding rows write to, after all slots."""
        return self.num_slots

    def layer(self, index: int) -> Any:
        """The keys and values that a layer reads, or its states. # [2, places, kv_heads, dim]"""
        return self.layers[index]

    def table(self, max_sequences: int, max_length: int) -> "SlotTable":
        """Make a slot table, whose rows have states if the model has recurrent layers."""
        layers = [layer for layer in self.layers if isinstance(layer, LayerStates)]
        states = States(layers, self.states, max_sequences, self.device) if layers else None
        return SlotTable(max_sequences, max_length, self.device, states)

    def write(self, index: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of rows in layer `index`, unless it reads those of another.
        # slots [rows] int64; keys, values [rows, kv_heads, dim]"""
        layer, own = self.shape.layers[index], self.layers[index]
        assert isinstance(layer, LayerKV), "a recurrent layer has states"
        assert isinstance(own, Tensor), "a recurrent layer has states"
        if layer.source is None:
            for kept, new in zip(own, (keys, values), strict=True):
                kept.index_copy_(0, slots, new.to(kept.dtype))


class SlotPool:
    """Allocator of slots, with the free ones on a stack. Slot 0 is the null slot, which padding reads; it is never
    allocated."""

    def __init__(
        self,
        num_slots: int,
        device: torch.device,
        *,
        first: int = NULL_SLOT + 1,
        windows: "Windows | None" = None,
    ) -> None:
        """`num_slots`: number of slots including the null slot; `first`: lowest slot to allocate; `windows`: places
        that slots are given in layers with a window; None if these layers keep all slots."""
        self.capacity = num_slots - 1
        self.owned = range(first, first + self.capacity)
        self.windows = windows
        self._stack = torch.arange(self.owned.stop - 1, first - 1, -1, device=device)  # [capacity]
        self.num_free = self.capacity

    @property
    def room(self) -> int:
        """Number of slots that can be allocated now."""
        return self.num_free if self.windows is None else min(self.num_free, self.windows.places.num_free)

    @property
    def num_places(self) -> int:
        """Number of slots that can have a place in layers with a window at once."""
        return self.capacity if self.windows is None else self.windows.places.capacity

    def allocate(self, count: int) -> Tensor:
        """Allocate `count` slots, each with a place in layers with a window; the caller checks that as many are free.
        # -> [count] int64"""
        assert count <= self.num_free, f"{count} slots requested, {self.num_free} free"
        self.num_free -= count
        slots = self._stack.narrow_copy(0, self.num_free, count)
        if self.windows is not None:
            self.windows.give(slots)
        return slots

    def free(self, slots: Tensor, *, placed: bool = True) -> None:
        """Return slots to the pool. `placed`: whether all, and not none, still have their places. # [count] int64"""
        if placed and self.windows is not None:
            self.windows.take(slots)
        count = slots.shape[0]
        self._stack[self.num_free : self.num_free + count] = slots
        self.num_free += count
        assert self.num_free <= self.capacity, "a slot was freed twice"

    def shuffle(self, generator: torch.Generator) -> None:
        """Let slots be allocated in random order; all must be free."""
        order = torch.randperm(self.capacity, generator=generator)
        self._stack = self._stack[order.to(self._stack.device)]

    def mark(self) -> tuple[int, int]:
        """Return the state to which `rewind` can go back while no slot has been freed since."""
        return self.num_free, 0 if self.windows is None else self.windows.places.num_free

    def rewind(self, mark: tuple[int, int]) -> None:
        """Undo all allocations since `mark`, whose slots are still in the stack."""
        self.num_free = mark[0]
        if self.windows is not None:
            self.windows.places.num_free = mark[1]

    def reset(self) -> None:
        """Free all slots."""
        self._stack = torch.arange(self.owned.stop - 1, self.owned.start - 1, -1, device=self._stack.device)
        self.num_free = self.capacity

    def free_slots(self) -> Tensor:
        """Copy the list of free slots, for conservation checks. # -> [num_free] int64"""
        return self._stack[: self.num_free].clone()


PASSED_AT_ONCE = 256
"""Positions of a text outside of serving that are placed before those that no window reaches are passed."""


class Windows:
    """The places of slots in layers with a window. A slot has one from its allocation until it is freed, or until its
    place is taken because no window reaches its position any more."""

    def __init__(self, window_of: Tensor, places: SlotPool, size: int) -> None:
        """`window_of`: as in `KVPool`; `places`: allocator of places; `size`: last positions that a row sees."""
        self.places, self.size = places, size
        self._of = window_of

    def give(self, slots: Tensor) -> None:
        """Give each slot a place. # [count] int64"""
        self._of.index_copy_(0, slots, self.places.allocate(slots.shape[0]))

    def take(self, slots: Tensor) -> None:
        """Take the places of slots, which must all have one. # [count] int64"""
        self.places.free(self._of[slots])
        self._of.index_fill_(0, slots, NULL_SLOT)

    def hand_over(self, givers: Tensor, takers: Tensor) -> None:
        """Give the places of some slots to others that have none. # both [count] int64"""
        self._of.index_copy_(0, takers, self._of[givers])
        self._of.index_fill_(0, givers, NULL_SLOT)

    def of(self, slots: Tensor) -> Tensor:
        """Places of slots. # [count] int64 -> like slots"""
        return self._of[slots]


class SlotTable:
    """Slots of the committed positions of running sequences, one row each. # [max_sequences, max_length] int64"""

    def __init__(self, max_sequences: int, max_length: int, device: torch.device, states: States | None = None) -> None:
        """`states`: states of the rows; None without recurrent layers."""
        self.states = states
        self.most_nodes = max_sequences * MAX_NODES if states is None else states.most_nodes  # of a step
        self.slots = torch.full((max_sequences, max_length), NULL_SLOT, dtype=torch.int64, device=device)
        self._free_rows = list(range(max_sequences - 1, -1, -1))

    def begin(self, row: int, state: int = NULL_STATE, position: int = 0) -> None:
        """Let recurrent layers go on from this state in a row, at this position."""
        if self.states is not None:
            self.states.begin(row, state, position)

    def advance(self, extends: Sequence[ExtendRows], accepted: Sequence[int] = (), path: Tensor | None = None) -> None:
        """Take over the states that a step has written; see `States.advance`. # path [completing, 1 + depth] int64"""
        if self.states is not None:
            self.states.advance(extends, accepted, path)

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
        self.begin(row)
        return slots
