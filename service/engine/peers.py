"""The processes that share a model, one for each device: how a forward's rows reach them, and how their sums are added.

The first process, the leader, has the engine; the others follow: they hear the rows of each forward, and compute their
part. Nothing else is sent: schedules, clocks, grammars, drafts and learning are the leader's alone. The thread that
computes forwards sends and reads all messages, in the order of the forwards.

They exchange bytes by sockets, not by torch.distributed: between two processes of one machine gloo took 0.2 to 0.7 ms
for sums of a layer's rows, a socket 0.03 ms.
"""

import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.pieces import Shard
from kernels.tree_attention import AttentionRows
from service.engine.kv_pool import KVPool


class PeerLost(RuntimeError):
    """A process that shares the model has ended, or does not answer."""


class Step(NamedTuple):
    """What the followers need of a forward."""

    attention: AttentionRows
    slots: Tensor  # [rows] int64
    logit_rows: Tensor | slice  # [logits] int64, or all rows
    table: Tensor  # [table rows, positions] int64
    room: "Room"
    window_of: Tensor | None  # as in `KVPool`


class Room(NamedTuple):
    """Size of the leader's KV pool."""

    num_slots: int
    num_places: int | None


class _Header(NamedTuple):
    """Sizes of a message about a forward, from which its parts follow."""

    rows: int
    sequences: int
    nodes: int
    logits: int  # -1: all rows have some
    table_rows: int
    positions: int
    changes: int  # of the slot table
    num_slots: int
    num_places: int  # -1: layers with a window keep all slots
    window_columns: int
    window_changes: int

    @property
    def room(self) -> Room:
        """Size of the pool."""
        return Room(self.num_slots, None if self.num_places < 0 else self.num_places)

    @property
    def parts(self) -> tuple[int, ...]:
        """Lengths of the message's parts, in order."""
        trees = self.sequences * self.nodes
        ancestors = -(-trees * self.nodes // _WORD)
        changes = self.changes, self.changes, self.window_changes, self.window_changes
        return *[self.rows] * 4, self.sequences, self.sequences, trees, trees, ancestors, max(0, self.logits), *changes


_WORD = 8  # bytes of a number in a message
_AT_ONCE = 1 << 15  # bytes that a connection takes before the other side reads


class _Mirror:
    """A table of the leader as the followers know it. # [rows, columns] int64"""

    def __init__(self) -> None:
        self.known = torch.zeros(0, 0, dtype=torch.int64)

    def changes(self, lines: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
        """Return places and values that differ from what is known, and know them from now on.
        # lines [lines], now [lines, columns] int64 -> both [changes] int64"""
        self._reach((int(lines.max()) + 1, now.shape[1]))
        places = lines[:, None] * self.known.shape[1] + torch.arange(now.shape[1])
        changed = self.known.view(-1)[places] != now
        found = places[changed], now[changed]
        self.known.view(-1)[found[0]] = found[1]
        return found

    def put(self, shape: tuple[int, int], places: Tensor, values: Tensor) -> Tensor:
        """Take over changes of a table of this shape. Returns the table. # places, values [changes] int64"""
        self._reach(shape)
        self.known.view(-1)[places] = values
        return self.known

    def _reach(self, shape: tuple[int, int]) -> None:
        before = self.known
        if shape[0] > before.shape[0] or shape[1] > before.shape[1]:
            self.known = before.new_zeros(*map(max, shape, before.shape))
            self.known[: before.shape[0], : before.shape[1]] = before


class Peers:
    """The processes that share a model, as this one sees them; without connections it is alone, and nothing is sent."""

    def __init__(
        self,
        shard: Shard = Shard(),  # noqa: B008 - a constant
        others: Mapping[int, Connection] = MappingProxyType({}),
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`others`: connections to the leader, or from it to all, and to those with which sums are added; `ended`:
        called when the leader has ended."""
        self.shard, self._others, self._ended = shard, others, ended
        self._slots, self._places = _Mirror(), _Mirror()  # of the slot table, and of layers with a window
        self._room: Room | None = None  # the pool of the last forward

    @property
    def leads(self) -> bool:
        """Whether this is the process with the engine."""
        return self.shard.rank == 0

    def total(self, number: int) -> int:
        """Add up a number of each process."""
        return int(self.added(torch.tensor([number])))

    def added(self, sums: Tensor) -> Tensor:
        """Add values of neighbours, then of neighbouring pairs: each addition is the same on both sides. See
        `kernels.pieces.Devices`. # sums [...] -> like sums"""
        own, distance = sums.contiguous(), 1
        while distance < self.shard.size:
            own, distance = own + self._exchanged(own, self.shard.rank ^ distance), 2 * distance
        return own

    def _exchanged(self, own: Tensor, rank: int) -> Tensor:
        """Send values to another process, which sends as many. # [...] -> like own"""
        theirs, other = torch.empty_like(own), self._others[rank]
        waits = own.nbytes > _AT_ONCE and self.shard.rank > rank  # else both could wait for the other to read
        with _telling_losses():
            if not waits:
                other.send_bytes(_bytes_of(own))
            other.recv_bytes_into(_bytes_of(theirs))
            if waits:
                other.send_bytes(_bytes_of(own))
        return theirs

    def shared(self, values: Tensor) -> Tensor:
        """Give the leader's values to all, in place. # [...]"""
        with _telling_losses():
            if not self.leads:
                self._others[0].recv_bytes_into(_bytes_of(values))
            else:
                self._send(_bytes_of(values.contiguous()))
        return values

    def joined(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Concatenate the columns of all processes on the leader; others get their own. `widths`: columns of each.
        # [rows, own columns] -> [rows, columns]"""
        with _telling_losses():
            if not self.leads:
                self._others[0].send_bytes(_bytes_of(part.contiguous()))
                return part
            parts = [part, *(part.new_empty(part.shape[0], width) for width in widths[1:])]
            for rank, theirs in enumerate(parts[1:], 1):
                self._others[rank].recv_bytes_into(_bytes_of(theirs))
        return torch.cat(parts, dim=1)

    def say(self, text: str = "") -> str:
        """Return the leader's text on all processes."""
        with _telling_losses():
            if not self.leads:
                return self._others[0].recv_bytes().decode()
            self._send(text.encode())
        return text

    def _send(self, message: bytes | memoryview) -> None:
        for rank in range(1, self.shard.size):
            self._others[rank].send_bytes(message)

    def tell(
        self, pool: KVPool, attention: AttentionRows, slots: Tensor, logit_rows: Tensor | slice, table: Tensor
    ) -> None:
        """Tell the followers the rows of the forward that this process runs next.
        # slots [rows], logit_rows [logits], table [table rows, positions] int64"""
        if self.shard.size == 1 or not self.leads:
            return
        self._begin(Room(pool.num_slots, pool.num_places))
        lines = attention.table_rows
        changes = self._slots.changes(lines, table[lines, : int(attention.extend_end.max()) + 1])
        moved = () if pool.window_of is None else self._places.changes(lines[:1] * 0, pool.window_of[None])
        trees = attention.node_slots, attention.node_depths
        flags = attention.ancestors.flatten().view(torch.uint8)
        chosen = slots[:0] if isinstance(logit_rows, slice) else logit_rows
        rows = attention.sequence, attention.positions, attention.node, slots
        parts = *rows, attention.extend_end, lines, *trees, _words(flags), chosen, *changes, *moved
        header = _Header(
            rows=len(slots),
            sequences=len(lines),
            nodes=attention.node_slots.shape[1],
            logits=-1 if isinstance(logit_rows, slice) else len(logit_rows),
            table_rows=self._slots.known.shape[0],
            positions=self._slots.known.shape[1],
            changes=len(changes[0]),
            num_slots=pool.num_slots,
            num_places=-1 if pool.num_places is None else pool.num_places,
            window_columns=self._places.known.shape[1],
            window_changes=len(moved[0]) if moved else 0,
        )
        with _telling_losses():
            self._send(_bytes_of(torch.cat([torch.tensor(header), *(part.flatten() for part in parts)])))

    def heard(self) -> Iterator[Step]:
        """Yield the leader's forwards until it ends. Each must be computed before the next is heard."""
        while message := self._heard():
            numbers = torch.frombuffer(bytearray(message), dtype=torch.int64)
            header = _Header(*numbers[: len(_Header._fields)].tolist())
            body = numbers[len(header) :].split(header.parts)
            sequence, positions, node, slots, ends, lines, node_slots, depths, flags, chosen, *changes = body
            self._begin(header.room)
            nodes = header.sequences, header.nodes
            seen = flags.view(torch.uint8)[: header.sequences * header.nodes**2].view(*nodes, header.nodes).bool()
            trees = node_slots.view(nodes), depths.view(nodes), seen
            table = self._slots.put((header.table_rows, header.positions), *changes[:2])
            moved = self._places.put((1, header.window_columns), *changes[2:]) if header.window_columns else None
            attention = AttentionRows(sequence, positions, node, lines, ends, *trees)
            logit_rows = slice(None) if header.logits < 0 else chosen
            yield Step(attention, slots, logit_rows, table, header.room, None if moved is None else moved[0])

    def _begin(self, room: Room) -> None:
        """Forget the tables of another pool."""
        if room != self._room:
            self._slots, self._places, self._room = _Mirror(), _Mirror(), room

    def wait_at_most(self, seconds: int) -> None:
        """Raise PeerLost from now on if another process does not read or answer a message for so long."""
        for other in self._others.values():
            with socket.socket(fileno=os.dup(other.fileno())) as same:
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))

    def _heard(self) -> bytes:
        """Read a message. Returns nothing once the leader has ended."""
        with _telling_losses(), suppress(EOFError):
            return self._others[0].recv_bytes()
        return b""

    def close(self) -> None:
        """Close all connections, so that the followers end, and wait for those of this machine."""
        for other in self._others.values():
            other.close()
        self._others = {}
        self._ended()


ALONE = Peers()


def _words(flags: Tensor) -> Tensor:
    """Bytes as numbers of a message, zero-padded. # [bytes] uint8 -> [words] int64"""
    return functional.pad(flags, (0, -len(flags) % _WORD)).view(torch.int64)


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor. # [...]"""
    return memoryview(values.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy 2 types it, 1 not


@contextmanager
def _telling_losses() -> Iterator[None]:
    """Turn errors of a connection in this context into PeerLost."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise PeerLost(f"a process that shares the model has ended or does not answer: {error!r}") from error
