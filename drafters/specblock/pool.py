"""A drafter's own keys and values in one pool addressed by the target's slot ids, and per sequence what is stored and
what is still to be run. An entry needs a position's target features and the token after it (section 3.1).
Legend: rows = sequences of the engine's table, batch = some of them, room = most entries that can wait."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.protocol import DraftingSizes, HostMetadata
from drafters.slots import HeldSlots, taken_slots
from drafters.specblock.network import ServingNetwork
from drafters.tree import MAX_DEPTH
from kernels.tree_attention import NULL_SLOT

WAITING = MAX_DEPTH + 1
"""Entries one step can commit: the root and every accepted node."""

ROOM = 2 * WAITING
"""Entries that can wait: how many a step commits is not known to the host when it must find room for them."""


class EntryPool:
    """Keys and values of committed entries, and behind them of a step's trees. # [layers, 2, slots * entries + lines *
    live, kv_heads, head_dim]"""

    def __init__(self, network: ServingNetwork, num_slots: int, *, lines: int = 0, live: int = 0) -> None:
        """There is room for `live` entries of each of so many lines of a batch."""
        self.entries = network.config.entries
        self._scratch = num_slots * self.entries + torch.arange(lines * live, device=network.device).view(lines, live)
        places = num_slots * self.entries + lines * live
        shape = (network.config.num_layers, 2, places, network.shape.kv_heads, network.shape.head_dim)
        # As of a target: on a CPU attention computes in fp32.
        dtype = torch.float32 if network.device.type == "cpu" else network.dtype
        self.storage = torch.zeros(shape, dtype=dtype, device=network.device)
        held = HeldSlots(num_slots, network.device)
        self.forget, self.forget_all, self.hold, self.holds = held.forget, held.forget_all, held.hold, held.holds

    def places(self, slots: Tensor) -> Tensor:
        """Where the entries of some slots lie. # [...] -> [..., entries] int64"""
        return slots[..., None] * self.entries + torch.arange(self.entries, device=slots.device)

    def scratch(self, batch: int, first: int, count: int) -> Tensor:
        """Where entries of trees lie, from the first-th on. # -> [batch, count] int64"""
        return self._scratch[:batch, first : first + count]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Entries to run, right-aligned: the last column is the newest position, the anchor of the next block."""

    features: Tensor  # [batch, count, taps * hidden]
    tokens: Tensor  # [batch, count] int64, the token after each position
    positions: Tensor  # [batch, count] int64, below 0 for padding
    slots: Tensor  # [batch, count] int64, NULL_SLOT for padding


class EntryState:
    """Per row: where the entries of known positions are, and those that wait for the next forward. Behind the rows
    stands one of nobody's, which pads batches; behind a row's columns one that takes padding."""

    def __init__(self, sizes: DraftingSizes, pool: EntryPool, width: int, dtype: torch.dtype) -> None:
        """`width` is that of features."""
        self.nobody, rows = sizes.max_sequences, sizes.max_sequences + 1
        max_length, device = sizes.max_length, sizes.device
        self._pool = pool
        # Places in the pool of entries that are run, or will be before others see them. # [rows, positions, entries]
        self._places = torch.zeros(rows, max_length + 1, pool.entries, dtype=torch.int64, device=device)
        self._known = torch.zeros(rows, dtype=torch.int64, device=device)  # positions in the table
        self._end = torch.zeros(rows, dtype=torch.int64, device=device)  # one past the newest position
        self._waiting = torch.zeros(rows, dtype=torch.int64, device=device)
        self._features = torch.zeros(rows, ROOM + 1, width, dtype=dtype, device=device)
        self._tokens = torch.zeros(rows, ROOM + 1, dtype=torch.int64, device=device)
        self._columns = torch.arange(ROOM, device=device)

    @property
    def table(self) -> Tensor:
        """Entries of each row, one behind the other: their places in the pool. # [rows, (max_length + 1) * entries]"""
        return self._places.flatten(1)

    def known(self, rows: Tensor) -> Tensor:
        """How many there are."""
        return self._known[rows] * self._pool.entries

    def start(self, rows: list[int]) -> None:
        """Forget everything about these rows."""
        self._known[rows] = 0
        self._end[rows] = 0
        self._waiting[rows] = 0

    def adopt(self, row: int, slots: Tensor) -> None:
        """Begin a row behind positions that lie in these slots already; those that were never run are left out.
        # slots [cached] int64"""
        readable = self._pool.holds(slots)
        column = (readable.cumsum(0) - 1).where(readable, self._places.shape[1] - 1)
        self._places[row, column] = self._pool.places(slots)
        self._known[row] = readable.sum()
        self._end[row] = slots.shape[0]

    def num_waiting(self, rows: Tensor) -> Tensor:
        return self._waiting[rows]

    def append(self, rows: Tensor, start: Tensor, counts: Tensor, slots: Tensor) -> Tensor:
        """Positions start..start + counts - 1 are committed; returns their slots, NULL_SLOT for padding.
        # rows, start, counts [batch] int64; slots [batch, count] int64, padded with any -> [batch, count] int64"""
        follows = self._end[rows] == start  # otherwise nothing is known of what stands before
        known = self._known[rows] * follows
        offsets = torch.arange(slots.shape[1], device=rows.device)
        columns = (known[:, None] + offsets).where(offsets < counts[:, None], self._places.shape[1] - 1)
        taken = taken_slots(slots, counts)
        self._places[rows[:, None], columns] = self._pool.places(taken)
        self._known.index_copy_(0, rows, known + counts)
        self._waiting.index_copy_(0, rows, self._waiting[rows] * follows)
        self._end.index_copy_(0, rows, start + counts)
        return taken

    def wait(self, rows: Tensor, counts: Tensor, features: Tensor, tokens: Tensor) -> None:
        """Queue the entries of the positions just appended; there must be room for them.
        # features [batch, count, taps * hidden]; tokens [batch, count] int64, the token after each position"""
        offsets = torch.arange(tokens.shape[1], device=rows.device)
        place = (self._waiting[rows, None] + offsets).where(offsets < counts[:, None], ROOM)
        self._features[rows[:, None], place] = features.to(self._features.dtype)
        self._tokens[rows[:, None], place] = tokens
        self._waiting.index_add_(0, rows, counts)

    def padding(self, batch: int) -> tuple[Tensor, ...]:
        """Rows, starts, counts, slots, features and tokens of nobody's entries, as many as a step can commit."""
        features = self._features.new_zeros(batch, WAITING, self._features.shape[2])
        tokens = self._tokens.new_zeros(batch, WAITING)
        start = tokens.new_zeros(batch)
        return start + self.nobody, start, torch.zeros_like(start), tokens + NULL_SLOT, features, tokens

    def take(self, rows: Tensor, most: int) -> Waiting:
        """The waiting entries of these rows, at most so many of each, which stop waiting. # -> [batch, most]"""
        counts = self._waiting[rows]
        column = self._columns[:most] - (most - counts[:, None])  # [batch, most], negative for padding
        present = column >= 0
        column = column.clamp(min=0)
        positions = torch.where(present, self._end[rows, None] - counts[:, None] + column, -1)
        lines = rows[:, None]
        newest = (self._known[lines] - counts[:, None] + column).clamp(min=0)
        slots = (self._places[lines, newest, 0] // self._pool.entries).masked_fill(~present, NULL_SLOT)
        self._waiting.index_fill_(0, rows, 0)
        return Waiting(self._features[lines, column], self._tokens[lines, column], positions, slots)


class Backlog:
    """Upper bounds of how many entries wait for each row, by what the host knows without asking the device: how much a
    step committed is said by the root of the next one."""

    def __init__(self, max_sequences: int) -> None:
        self._before = [0] * max_sequences
        self._newest = [(0, 0)] * max_sequences  # root of the last commit and most entries it can have brought

    def take(self, host: HostMetadata) -> int:
        """The entries of these rows are run; most of any."""
        most = max(self._waiting(row, root) for row, root in zip(host.rows, host.roots, strict=True))
        self.clear(host.rows)
        return most

    def crowded(self, host: HostMetadata, room: int) -> HostMetadata:
        """Those rows of which more entries than this can be waiting."""
        found = [
            (row, root) for row, root in zip(host.rows, host.roots, strict=True) if self._waiting(row, root) > room
        ]
        return HostMetadata(tuple(row for row, _ in found), tuple(root for _, root in found))

    def add(self, host: HostMetadata, most: int) -> None:
        """A step has committed at most so many entries of each row, the first of them the root's."""
        for row, root in zip(host.rows, host.roots, strict=True):
            self._waiting(row, root)
            self._newest[row] = root, most

    def clear(self, rows: Sequence[int]) -> None:
        """Nothing waits for these rows."""
        for row in rows:
            self._before[row], self._newest[row] = 0, (0, 0)

    def _waiting(self, row: int, root: int) -> int:
        """Most entries that wait for a row whose root stands here by now."""
        start, most = self._newest[row]
        self._before[row] += max(0, min(most, root - start))
        self._newest[row] = root, 0
        return self._before[row]
