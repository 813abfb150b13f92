"""A drafter's own keys and values in one pool addressed by the target's slot ids, and per sequence what is stored and
what is still to be run. An entry needs a position's target features and the token after it (section 3.1).
Legend: rows = sequences of the engine's table, batch = some of them, room = most entries that can wait."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.protocol import DraftingSizes, HostMetadata
from drafters.slots import HeldSlots
from drafters.specblock.network import ServingNetwork
from drafters.tree import MAX_DEPTH
from kernels import ops
from kernels.entries import EntryTables, Placed, places_of
from kernels.entries import Waiting as Waiting
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
        self.held = held.table

    def places(self, slots: Tensor) -> Tensor:
        """Where the entries of some slots lie. # [...] -> [..., entries] int64"""
        return places_of(slots, self.entries)

    def scratch(self, batch: int, first: int, count: int) -> Tensor:
        """Where entries of trees lie, from the first-th on. # -> [batch, count] int64"""
        return self._scratch[:batch, first : first + count]


class EntryState:
    """Per row: where the entries of known positions are, and those that wait for the next forward. Behind the rows
    stands one of nobody's, which pads batches; behind a row's columns one that takes padding."""

    def __init__(self, sizes: DraftingSizes, pool: EntryPool, width: int, dtype: torch.dtype) -> None:
        """`width` is that of features."""
        self.nobody, rows = sizes.max_sequences, sizes.max_sequences + 1
        max_length, device = sizes.max_length, sizes.device
        self._pool = pool
        self.max_length = max_length
        known, ends, waiting = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._tables = EntryTables(
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
        """Entries of each row, one behind the other: their places in the pool. # [rows, (max_length + 1) * entries]"""
        return self._tables.places.flatten(1)

    def known(self, rows: Tensor) -> Tensor:
        """How many there are."""
        return self._tables.known[rows] * self._pool.entries

    def start(self, rows: list[int]) -> None:
        """Forget everything about these rows."""
        tables = self._tables
        tables.known[rows] = tables.ends[rows] = tables.waiting[rows] = 0

    def adopt(self, row: int, slots: Tensor) -> None:
        """Begin a row behind positions that lie in these slots already; those that were never run are left out.
        # slots [cached] int64"""
        readable, tables = self._pool.holds(slots), self._tables
        column = (readable.cumsum(0) - 1).where(readable, tables.places.shape[1] - 1)
        tables.places[row, column] = self._pool.places(slots)
        tables.known[row] = readable.sum()
        tables.ends[row] = slots.shape[0]

    def append(self, rows: Tensor, starts: Tensor, counts: Tensor, slots: Tensor) -> None:
        """Positions starts..starts + counts - 1 are committed, and run otherwise; what their slots held is forgotten.
        # rows, starts, counts [batch] int64; slots [batch, count] int64, padded with any"""
        self._ops.add_entries(self._tables, rows, starts, counts, slots, None, None)

    def wait(
        self, rows: Tensor, starts: Tensor, counts: Tensor, slots: Tensor, features: Tensor, tokens: Tensor
    ) -> None:
        """The same, and their entries wait to be run; there must be room for them.
        # features [batch, count, taps * hidden]; tokens [batch, count] int64, the token after each position"""
        self._ops.add_entries(self._tables, rows, starts, counts, slots, features, tokens)

    def padding(self, batch: int) -> tuple[Tensor, ...]:
        """Rows, starts, counts, slots, features and tokens of nobody's entries, as many as a step can commit."""
        tables = self._tables
        features = tables.features.new_zeros(batch, WAITING, tables.features.shape[2])
        tokens = tables.tokens.new_zeros(batch, WAITING)
        start = tokens.new_zeros(batch)
        return start + self.nobody, start, torch.zeros_like(start), tokens + NULL_SLOT, features, tokens

    def take(self, rows: Tensor, most: int) -> Waiting:
        """The waiting entries of these rows, at most so many of each, which are run at once. # -> [batch, most]"""
        return self._ops.take_entries(self._tables, rows, most)

    def placed(self, rows: Tensor, waiting: Waiting, size: int) -> Placed:
        """Where these entries are run, and at the newest of them a block of `size` entries, or none of size 0."""
        scratch = self._pool.scratch(len(rows), 0, max(0, size - self._pool.entries))
        return self._ops.place_entries(self._tables, rows, waiting.positions, waiting.slots, scratch, size)


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
