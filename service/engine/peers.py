"""The processes that share a model, one for each device: how a forward's rows reach them, and how their sums are added.

The first process, the leader, has the engine; the others follow: they hear the rows of each forward, and compute their
part. Nothing else is sent: schedules, clocks, grammars, drafts and learning are the leader's alone. The thread that
computes forwards sends and reads all messages, in the order of the forwards.

They exchange bytes by sockets, not by torch.distributed: between two processes of one machine gloo took 0.2 to 0.7 ms
for sums of a layer's rows, a socket 0.03 ms. What is on a GPU passes through the host's memory.
"""

import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
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

    num_slots: int  # of the leader's KV pool, as is `num_places`
    num_places: int | None
    places: tuple[Tensor, Tensor]  # slots, and their places in layers with a window; both [slots] int64
    attention: AttentionRows  # whose table rows count from 0
    slots: Tensor  # [rows] int64
    logit_rows: Tensor | slice  # [logits] int64, or all rows
    table: Tensor  # [sequences, positions] int64, slots of committed positions


_NUMBERS, _PARTS = 3, 12  # of a message about a forward: sizes of the pool and a flag, and tensors
_WORD = 8  # bytes of a number in a message
_LEAST_WIDTH = 512  # positions of a follower's slot table
_BEAT = b"beat"
_AT_ONCE = 1 << 15  # bytes that a connection takes before the other side reads


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

    def total(self, number: int) -> int:
        """Add up a number of each process. Raises PeerLost."""
        with self.guarded():
            return int(self.added(torch.tensor([number])))  # planned transfer: at start and while idle

    def added(self, sums: Tensor) -> Tensor:
        """Add values of neighbours, then of neighbouring pairs: each addition is the same on both sides. See
        `kernels.pieces.Devices`. # sums [...] -> like sums"""
        own, distance = sums.cpu().contiguous(), 1  # planned transfer: devices exchange through the host
        while distance < self.shard.size:
            own, distance = own + self._exchanged(own, self.shard.rank ^ distance), 2 * distance
        return own.to(sums.device)

    def _exchanged(self, own: Tensor, rank: int) -> Tensor:
        """Send values to another process, which sends as many. # [...] -> like own"""
        waits = own.nbytes > _AT_ONCE and self.shard.rank > rank  # else both could wait for the other to read
        if not waits:
            self._others[rank].send_bytes(_bytes_of(own))
        theirs = self._received(torch.empty_like(own), rank)
        if waits:
            self._others[rank].send_bytes(_bytes_of(own))
        return theirs

    def _received(self, values: Tensor, rank: int) -> Tensor:
        """Read values into a tensor. # [...] -> values"""
        if self._others[rank].recv_bytes_into(_bytes_of(values)) != values.nbytes:
            raise OSError("the processes are not at the same place of a forward")
        return values

    def shared(self, values: Tensor) -> Tensor:
        """Return the leader's values on all processes. `values`: others' have the same shape and type. # [...]"""
        if self.shard.rank:
            return self._received(torch.empty_like(values, device="cpu"), 0).to(values.device)
        self._send(_bytes_of(values.cpu().contiguous()))  # planned transfer
        return values

    def joined(self, part: Tensor, columns: int) -> Tensor:
        """Concatenate the columns of all processes on the leader; others get their own. `columns`: of all.
        # [rows, own columns] -> [rows, columns]"""
        if not part.shape[0]:
            return part.new_empty(0, columns)
        if self.shard.rank:
            self._others[0].send_bytes(_bytes_of(part.cpu().contiguous()))  # planned transfer
            return part
        others = [bytearray(self._others[rank].recv_bytes()) for rank in range(1, self.shard.size)]
        values = [torch.frombuffer(theirs, dtype=part.dtype).view(part.shape[0], -1) for theirs in others]
        return torch.cat([part, *(own.to(part.device) for own in values)], dim=1)

    def say(self, text: str = "") -> str:
        """Return the leader's text on all processes. Raises PeerLost."""
        with self.guarded():
            if self.shard.rank:
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
        if self.shard.size == 1 or self.shard.rank:
            return
        end = int(attention.extend_end.max()) + 1  # planned transfer
        lines, nodes, none = table[attention.table_rows, :end], attention.node_slots, slots[:0]
        used = none if pool.window_of is None else torch.cat([slots, nodes.flatten(), lines.flatten()])
        whole, chosen = (True, none) if isinstance(logit_rows, slice) else (False, logit_rows)
        parts = [
            *(attention.sequence, attention.positions, attention.node, slots, attention.extend_end, nodes),
            *(attention.node_depths, _words(attention.ancestors), chosen, lines),
            *(used, none if pool.window_of is None else pool.window_of[used]),
        ]
        numbers = [pool.num_slots, pool.num_places or 0, whole, *(part.numel() for part in parts)]
        message = torch.cat([part.flatten() for part in parts]).cpu()  # planned transfer
        self._send(_bytes_of(torch.cat([torch.tensor(numbers), message])))

    def heard(self, device: torch.device) -> Iterator[SharedForward]:
        """Yield the leader's forwards until it ends. Each must be computed, on `device`, before the next is heard."""
        while message := self._heard():
            if message == _BEAT:
                self.total(0)
                continue
            numbers = torch.frombuffer(bytearray(message), dtype=torch.int64)
            num_slots, num_places, whole, *lengths = numbers[: _NUMBERS + _PARTS].tolist()  # planned transfer
            # Kernels are compiled for aligned tensors, and for few widths of tables.
            parts = [part.to(device, copy=True) for part in numbers[_NUMBERS + _PARTS :].split(lengths)]
            sequence, positions, node, slots, ends, *trees, flags, chosen, lines, used, places = parts
            count, nodes, width = len(ends), len(trees[0]) // len(ends), len(lines) // len(ends)
            table = functional.pad(
                lines.view(count, width), (0, max(_LEAST_WIDTH, 1 << (width - 1).bit_length()) - width)
            )
            shapes = (count, nodes), (count, nodes, nodes)
            seen = flags.view(torch.uint8)[: count * nodes**2].view(shapes[1]).bool()
            node_slots, depths = (value.view(shapes[0]) for value in trees)
            order = torch.arange(count, device=device)
            rows = AttentionRows(sequence, positions, node, order, ends, node_slots, depths, seen)
            logit_rows = slice(None) if whole else chosen
            pool = num_slots, num_places or None
            yield SharedForward(*pool, (used, places), rows, slots, logit_rows, table)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn an error in this context into PeerLost, and end the other processes, which cannot know where to go on.
        Does nothing where this process is alone."""
        try:
            yield
        except Exception as error:
            if self.shard.size == 1:
                raise
            self.close()
            raise PeerLost(f"a process that shares the model does not answer, or this one failed: {error!r}") from error

    def wait_at_most(self, seconds: int) -> None:
        """Raise PeerLost from now on if another process does not read or answer a message for so long."""
        for other in self._others.values():
            set_patience(other, seconds)

    def beat(self) -> None:
        """Ask whether all processes answer. Raises PeerLost."""
        if not self.shard.rank and self._others:
            with self.guarded():
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


def set_patience(other: Connection, seconds: int) -> None:
    """Let reads and writes of a connection fail after so long; 0: never."""
    with socket.socket(fileno=os.dup(other.fileno())) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def _words(flags: Tensor) -> Tensor:
    """Flags as numbers of a message, zero-padded. # [...] bool -> [words] int64"""
    bytes_of = flags.flatten().view(torch.uint8)
    return functional.pad(bytes_of, (0, -len(bytes_of) % _WORD)).view(torch.int64)


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor. # [...]"""
    return memoryview(values.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy 2 types it, 1 not
