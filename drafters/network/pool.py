"""A drafter's own keys and values, in a pool addressed by the target's slot ids, and tables of the entries that each
sequence has stored and of those that wait to be run. An entry needs the target features of its position and the next
token (section 3.1).

At most ROOM entries wait per row. `Backlog` has an upper bound of their number on the host, and the drafter runs
waiting entries before a commit could exceed ROOM.
Legend: rows = sequences of the engine's table, batch = some of them, room = maximum number of waiting entries."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.network.served import ServingNetwork
from drafters.protocol import DraftingSizes, HostMetadata
from drafters.slots import HeldSlots
from drafters.tree import MAX_DEPTH
from kernels import ops
from kernels.cpu.library import pool_memory
from kernels.entries import EntryTables, Placed, places_of
from kernels.entries import Waiting as Waiting
from kernels.tree_attention import NULL_SLOT

WAITING = MAX_DEPTH + 1
"""Maximum number of entries that one step commits: root and accepted nodes."""

ROOM = 2 * WAITING
"""Maximum number of waiting entries per row: of two steps, as the host learns a step's count one step later."""


class EntryPool:
    """Keys and values of committed entries, then of growing trees:
    `storage` [layers, 2, slots * entries + sequences * live, kv_heads, head_dim]."""

    def __init__(self, network: ServingNetwork, num_slots: int, *, sequences: int = 0, live: int = 0) -> None:
        """`sequences`, `live`: most sequences of a batch, and entries of a growing tree for each."""
        self.entries = network.traits.entries
        scratch = torch.arange(sequences * live, device=network.device).view(sequences, live)
        self.scratch_places = num_slots * self.entries + scratch  # [sequences, live]
        places = num_slots * self.entries + sequences * live
        attention = network.shape.attention
        shape = (network.config.num_layers, 2, places, attention.kv_heads, attention.dim)
        self.storage = pool_memory(shape, network.dtype, network.device)
        held = HeldSlots(num_slots, network.device)
        self.forget, self.forget_all, self.hold, self.holds = held.forget, held.forget_all, held.hold, held.holds
        self.held = held.table

    def places(self, slots: Tensor) -> Tensor:
        """Return the pool indices of the entries of these slots. # slots [...] -> [..., entries] int64"""
        return places_of(slots, self.entries)

    def scratch(self, batch: int, first: int, count: int) -> Tensor:
        """Return the pool indices of entries first .. first + count - 1 of each tree. # -> [batch, count] int64"""
        return self.scratch_places[:batch, first : first + count]


class EntryState:
    """Tables by row: pool indices of the entries of known positions, and the entries that wait for the next forward.
    The last row is a dummy that pads batches; the last column of each row is for padding."""

    def __init__(self, sizes: DraftingSizes, pool: EntryPool, width: int, dtype: torch.dtype) -> None:
        """`width`: of features, taps * hidden; `dtype`: of features."""
        self._dummy_row, rows = sizes.max_sequences, sizes.max_sequences + 1
        max_length, device = sizes.max_length, sizes.device
        self._pool = pool
        self.max_length = max_length
        known, ends, waiting = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self.tables = EntryTables(
            torch.zeros(rows, max_length + 1, pool.entries, dtype=torch.int64, device=device),
            known,
            ends,
            waiting,
            torch.zeros(rows, ROOM + 1, width, dtype=dtype, device=device),
            torch.zeros(rows, ROOM + 1, dtype=torch.int64, device=device),
            pool.held,
        )
        self._ops = ops.on(known.device)

    @property
    def table(self) -> Tensor:
        """Pool indices of each row's entries, in order. # [rows, (max_length + 1) * entries] int64"""
        return self.tables.places.flatten(1)

    def known(self, rows: Tensor) -> Tensor:
        """Return the number of known entries. # rows [batch] -> [batch] int64"""
        return self.tables.known[rows] * self._pool.entries

    def start(self, rows: list[int]) -> None:
        """Start sequences in these rows, without entries."""
        tables = self.tables
        for row in rows:  # lists as indices would make the host wait
            tables.known[row] = tables.ends[row] = tables.waiting[row] = 0

    def adopt(self, row: int, slots: Tensor) -> None:
        """Start a row with the entries of a cached prefix, without positions that the drafter never ran.
        # slots [cached] int64"""
        readable, tables = self._pool.holds(slots), self.tables
        column = (readable.cumsum(0) - 1).where(readable, tables.places.shape[1] - 1)
        tables.places[row, column] = self._pool.places(slots)
        tables.known[row] = readable.sum()
        tables.ends[row] = slots.shape[0]

    def append(self, rows: Tensor, starts: Tensor, counts: Tensor, slots: Tensor) -> None:
        """Add the committed positions starts .. starts + counts - 1, whose entries the caller runs at once. Their slots
        are marked as not run. # rows, starts, counts [batch] int64; slots [batch, count] int64, padding arbitrary"""
        self._ops.add_entries(self.tables, rows, starts, counts, slots, None, None)

    def wait(
        self, rows: Tensor, starts: Tensor, counts: Tensor, slots: Tensor, features: Tensor, tokens: Tensor
    ) -> None:
        """Add committed positions as `append` does, and queue their entries to be run; the queue must have room. #
        rows, starts, counts [batch]; slots [batch, count]; features [batch, count, taps * hidden]; tokens [batch,
        count] int64, the token after each position"""
        self._ops.add_entries(self.tables, rows, starts, counts, slots, features, tokens)

    def padding(self, batch: int) -> tuple[Tensor, ...]:
        """Return the arguments of `wait` for dummy rows: rows, starts, counts [batch], slots, features, tokens
        [batch, WAITING, ...]."""
        tables = self.tables
        features = tables.features.new_zeros(batch, WAITING, tables.features.shape[2])
        tokens = tables.tokens.new_zeros(batch, WAITING)
        start = tokens.new_zeros(batch)
        return start + self._dummy_row, start, torch.zeros_like(start), tokens + NULL_SLOT, features, tokens

    def take(self, rows: Tensor, most: int) -> Waiting:
        """Remove and return at most `most` waiting entries of each row; the caller runs them at once.
        # rows [batch] -> [batch, most]"""
        return self._ops.take_entries(self.tables, rows, most)

    def placed(self, rows: Tensor, waiting: Waiting, size: int) -> Placed:
        """Return pool places and positions for these entries, and for a block of `size` entries (0: none) at the
        newest. # rows [batch]"""
        scratch = self._pool.scratch(len(rows), 0, max(0, size - self._pool.entries))
        return self._ops.place_entries(self.tables, rows, waiting.positions, waiting.slots, scratch, size)


class Backlog:
    """Upper bounds, on the host, of the number of waiting entries per row. The number that a step committed becomes
    known from the next step's root."""

    def __init__(self, max_sequences: int) -> None:
        self._before = [0] * max_sequences
        self._newest = [(0, 0)] * max_sequences  # root of the last commit, and the most entries that it may have added

    def take(self, host: HostMetadata) -> int:
        """Clear these rows, because their entries are run now, and return the largest of their bounds."""
        most = max(self._waiting(row, root) for row, root in zip(host.rows, host.roots, strict=True))
        self.clear(host.rows)
        return most

    def crowded(self, host: HostMetadata, room: int) -> HostMetadata:
        """Return the rows whose bound is above `room`."""
        found = [
            (row, root) for row, root in zip(host.rows, host.roots, strict=True) if self._waiting(row, root) > room
        ]
        return HostMetadata(tuple(row for row, _ in found), tuple(root for _, root in found))

    def add(self, host: HostMetadata, most: int) -> None:
        """Record that a step committed at most `most` entries of each row, beginning at its root."""
        for row, root in zip(host.rows, host.roots, strict=True):
            self._waiting(row, root)
            self._newest[row] = root, most

    def clear(self, rows: Sequence[int]) -> None:
        """Record that no entries of these rows wait."""
        for row in rows:
            self._before[row], self._newest[row] = 0, (0, 0)

    def _waiting(self, row: int, root: int) -> int:
        """Return the bound of a row, whose root is now at this position."""
        start, most = self._newest[row]
        self._before[row] += max(0, min(most, root - start))
        self._newest[row] = root, 0
        return self._before[row]
