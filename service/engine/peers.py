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
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.pieces import TensorShard
from kernels.tree_attention import AttentionRows
from service.engine.kv_pool import KVPool
from service.errors import PeerLost


class SharedForward(NamedTuple):
    """What the followers need of a forward."""

    sizes: "Sizes"
    attention: AttentionRows
    slots: Tensor  # [rows] int64
    logit_rows: Tensor | slice  # [logits] int64, or all rows
    table: Tensor  # [table rows, positions] int64
    window_of: Tensor | None  # as in `KVPool`


class Sizes(NamedTuple):
    """Numbers at the beginning of a message about a forward, before the lengths of its parts."""

    num_slots: int  # of the leader's KV pool, like the next one
    num_places: int  # 0: layers with a window keep all slots
    table_rows: int
    positions: int
    window_columns: int
    all_logits: int  # whether all rows have logits

    @property
    def pool(self) -> tuple[int, int | None]:
        """Numbers of slots and of places."""
        return self.num_slots, self.num_places or None


_PARTS = 14  # of a message
_WORD = 8  # bytes of a number in a message
_BEAT = b"beat"
_AT_ONCE = 1 << 15  # bytes that a connection takes before the other side reads


class _Mirror:
    """A table of the leader as the followers know it. # [rows, columns] int64"""

    def __init__(self) -> None:
        self.known = torch.zeros(0, 0, dtype=torch.int64)

    def changes(self, lines: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
        """Return places and values that differ from what is known, and know them from now on.
        # lines [lines], now [lines, columns] int64 -> both [changes] int64"""
        self._reach((int(lines.max()) + 1, now.shape[1]))  # planned transfer: only CPUs share a model
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
        shard: TensorShard = TensorShard(),  # noqa: B008 - a constant
        others: Mapping[int, Connection] = MappingProxyType({}),
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`others`: connections to the leader, or from it to all, and to those with which sums are added; `ended`:
        called when this process takes part no longer."""
        self.shard, self._others, self._ended = shard, others, ended
        self._slots, self._places = _Mirror(), _Mirror()  # of the slot table, and of layers with a window
        self._pool: tuple[int, int | None] | None = None  # numbers of slots and places at the last forward

    @property
    def leads(self) -> bool:
        """Whether this is the process with the engine."""
        return self.shard.rank == 0

    def total(self, number: int) -> int:
        """Add up a number of each process."""
        return int(self.added(torch.tensor([number])))  # planned transfer: at start and while idle

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
        with self._telling_losses():
            if not waits:
                other.send_bytes(_bytes_of(own))
            other.recv_bytes_into(_bytes_of(theirs))
            if waits:
                other.send_bytes(_bytes_of(own))
        return theirs

    def shared(self, values: Tensor) -> Tensor:
        """Give the leader's values to all, in place. # [...]"""
        with self._telling_losses():
            if not self.leads:
                self._others[0].recv_bytes_into(_bytes_of(values))
            else:
                self._send(_bytes_of(values.contiguous()))
        return values

    def joined(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Concatenate the columns of all processes on the leader; others get their own. `widths`: columns of each.
        # [rows, own columns] -> [rows, columns]"""
        with self._telling_losses():
            if not self.leads:
                self._others[0].send_bytes(_bytes_of(part.contiguous()))
                return part
            parts = [part, *(part.new_empty(part.shape[0], width) for width in widths[1:])]
            for rank, theirs in enumerate(parts[1:], 1):
                self._others[rank].recv_bytes_into(_bytes_of(theirs))
        return torch.cat(parts, dim=1)

    def say(self, text: str = "") -> str:
        """Return the leader's text on all processes."""
        with self._telling_losses():
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
        self._begin((pool.num_slots, pool.num_places))
        lines, whole = attention.table_rows, isinstance(logit_rows, slice)
        end = int(attention.extend_end.max()) + 1  # planned transfer: only CPUs share a model
        moved = (slots[:0], slots[:0])
        if pool.window_of is not None:
            moved = self._places.changes(torch.zeros_like(lines[:1]), pool.window_of[None])
        parts = [
            *(attention.sequence, attention.positions, attention.node, slots, attention.extend_end, lines),
            *(attention.node_slots, attention.node_depths, _words(attention.ancestors)),
            *(slots[:0] if isinstance(logit_rows, slice) else logit_rows,),
            *self._slots.changes(lines, table[lines, :end]),
            *moved,
        ]
        known = *self._slots.known.shape, self._places.known.shape[1]
        sizes = pool.num_slots, pool.num_places or 0, *known, whole
        numbers = torch.tensor([*sizes, *(part.numel() for part in parts)])
        with self._telling_losses():
            self._send(_bytes_of(torch.cat([numbers, *(part.flatten() for part in parts)])))

    def heard(self) -> Iterator[SharedForward]:
        """Yield the leader's forwards until it ends. Each must be computed before the next is heard."""
        while message := self._heard():
            if message == _BEAT:
                self.total(0)
                continue
            numbers = torch.frombuffer(bytearray(message), dtype=torch.int64)
            begin, lengths, rest = numbers.split(
                [len(Sizes._fields), _PARTS, len(numbers) - len(Sizes._fields) - _PARTS]
            )
            sizes = Sizes(*begin.tolist())  # planned transfer: only CPUs share a model
            sequence, positions, node, slots, ends, lines, *trees, flags, chosen, place, slot, at, to = rest.split(
                lengths.tolist()  # planned transfer: only CPUs share a model
            )
            self._begin(sizes.pool)
            node_slots, depths = (
                value.view(len(lines), -1) if len(value) else value.view(len(lines), 0) for value in trees
            )
            count = node_slots.shape[1]
            seen = flags.view(torch.uint8)[: len(lines) * count**2].view(len(lines), count, count).bool()
            table = self._slots.put((sizes.table_rows, sizes.positions), place, slot)
            windows = self._places.put((1, sizes.window_columns), at, to)[0] if sizes.window_columns else None
            rows = AttentionRows(sequence, positions, node, lines, ends, node_slots, depths, seen)
            yield SharedForward(sizes, rows, slots, slice(None) if sizes.all_logits else chosen, table, windows)

    def _begin(self, pool: tuple[int, int | None]) -> None:
        """Forget the tables of another pool. `pool`: numbers of slots and of places."""
        if pool != self._pool:
            self._slots, self._places, self._pool = _Mirror(), _Mirror(), pool

    @contextmanager
    def _telling_losses(self) -> Iterator[None]:
        """Turn errors of a connection in this context into PeerLost, after which the other processes end, too."""
        try:
            yield
        except (OSError, EOFError) as error:
            self.close()
            raise PeerLost(f"a process that shares the model has ended or does not answer: {error!r}") from error

    def wait_at_most(self, seconds: int) -> None:
        """Raise PeerLost from now on if another process does not read or answer a message for so long."""
        for other in self._others.values():
            with socket.socket(fileno=os.dup(other.fileno())) as same:
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))

    def beat(self) -> None:
        """Ask whether all processes answer. Raises PeerLost."""
        if self.leads and self._others:
            with self._telling_losses():
                self._send(_BEAT)
            self.total(0)

    def _heard(self) -> bytes:
        """Read a message. Returns nothing once the leader has ended."""
        try:
            return self._others[0].recv_bytes()
        except (OSError, EOFError):
            return b""

    def close(self) -> None:
        """Close all connections, so that the followers end."""
        for other in self._others.values():
            other.close()
        self._others = {}
        self._ended()


ALONE = Peers()


def _words(flags: Tensor) -> Tensor:
    """Flags as numbers of a message, zero-padded. # [...] bool -> [words] int64"""
    bytes_of = flags.flatten().view(torch.uint8)
    return functional.pad(bytes_of, (0, -len(bytes_of) % _WORD)).view(torch.int64)


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor. # [...]"""
    return memoryview(values.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy 2 types it, 1 not
