"""Starts the processes that share a model, `tensor_parallel` of them, or meets those that torchrun has started.

The leader loads its part, serves, and tells the others what to load. Followers end with the leader. If one ends or does
not answer any more, the leader's engine fails, as at any other fault of an engine.
"""

import json
import logging
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import torch
from torch.distributed import is_torchelastic_launched
from torch.distributed.rendezvous import rendezvous

from kernels import ops
from kernels.cpu.library import use_threads
from kernels.pieces import TensorShard
from service import __version__
from service.config import ServiceConfig
from service.engine.kv_pool import KVPool
from service.engine.peers import Peers, set_patience
from service.engine.shards import ModelShard
from service.engine.target import Target
from service.engine.weights import Described, LoadedModel, describe, kv_shape, load_weights
from service.errors import PeerLost, StartupError

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_MEETING = "adaptree"  # key of the leader's address in torchrun's store
_KEY_BYTES = 32
_PATIENCE_SECONDS = 30  # for which the leader waits for a part of a layer; it computes one just as long
_POLL_SECONDS = 0.2
_MEETING_SECONDS = 600  # in which all processes must come
_GREETING_SECONDS = 5


@dataclass(frozen=True, slots=True)
class SharedModel:
    """What a follower loads, and by what it computes."""

    model: str
    options: dict[str, Any]  # further arguments of `describe`
    device: str  # of the leader; the others take those after it
    dtype: str
    in_blocks: bool
    in_8_bits: bool
    threads: int
    build: str = ""  # versions and kernels, which must be the leader's


def build_name(device: torch.device) -> str:
    """Versions and kernels on which the bits of a forward depend."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"adaptree {__version__}, torch {torch.__version__}, {ops.kernel_set(device)} on {where}"


def load_shared(described: Described, size: int, what: SharedModel, load: Callable[..., LoadedModel]) -> LoadedModel:
    """Start the followers and load the leader's part, while they load theirs. `load`: loads a part. Raises
    StartupError."""
    part = ModelShard.of(described.config, TensorShard(0, size))
    peers = _lead(size)
    try:
        peers.say(json.dumps(asdict(replace(what, build=build_name(torch.device(what.device))))))
        loaded = load(part=part)
        peers.say(part.digest())
        peers.total(0)  # all have loaded theirs
    except PeerLost as error:
        raise StartupError(f"one of the {size} processes that share the model has ended: {error}") from error
    except BaseException:
        peers.close()
        raise
    peers.wait_at_most(_PATIENCE_SECONDS)
    return replace(loaded, peers=peers)


def refuse_sharing(device: torch.device) -> None:
    """Raise StartupError if processes cannot share a model on such devices."""
    if ops.kernel_set(device) == "torch":
        raise StartupError("tensor_parallel is more than 1, but no kernels are compiled: set it to 1")


def follow(peers: Peers) -> None:
    """Load this process's part of the model, and compute it until the leader ends. Raises StartupError, and PeerLost if
    the leader does not end as it should."""
    what = SharedModel(**json.loads(peers.say()))
    use_threads(what.threads)
    device = _device_after(torch.device(what.device), peers.shard.rank)
    if what.build != build_name(device):
        raise StartupError(
            f"the leader runs {what.build}, but this process {build_name(device)}: install the same, on equal devices"
        )
    described = describe(what.model, **what.options)
    part, dtype = ModelShard.of(described.config, peers.shard), getattr(torch, what.dtype)
    model = load_weights(described, dtype, device, in_blocks=what.in_blocks, part=part)
    if peers.say() != part.digest():
        raise StartupError(f"{what.model} has other weights here than where the leader runs: copy the same files")
    peers.total(0)
    shape = kv_shape(model, part)
    target = Target(model, KVPool(shape, 2, device), part, peers, in_8_bits=what.in_8_bits)
    logger.info("process %d of %d has its part of the model", peers.shard.rank + 1, peers.shard.size)
    compute(target)


def _device_after(leader: torch.device, rank: int) -> torch.device:
    """The device of a follower. Raises StartupError if there is none like the leader's."""
    if leader.type == "cpu":
        return leader
    if not (count := torch.cuda.device_count()):
        raise StartupError(f"the leader runs on {leader}, but this machine has no GPU: set device to cpu")
    device = torch.device(leader.type, ((leader.index or 0) + rank) % count)
    torch.cuda.set_device(device)
    return device


@torch.inference_mode()
def compute(target: Target) -> None:
    """Compute a follower's part of the leader's forwards until it ends. Raises PeerLost."""
    for forward in target.peers.heard(target.device):
        sizes = forward.num_slots, forward.num_places
        if sizes != (target.pool.num_slots, target.pool.num_places):
            target.pool = KVPool(target.pool.shape, sizes[0], target.device, num_places=sizes[1])
        if target.pool.window_of is not None:
            target.pool.window_of.index_copy_(0, *forward.places)
        # Tokens are not sent: the leader looks up their embeddings.
        target.compute(forward.slots, *forward[3:], features=False)


def _lead(size: int) -> Peers:
    """Start the followers, or meet those of torchrun. Raises StartupError if they do not come."""
    key, processes = secrets.token_bytes(_KEY_BYTES), list[subprocess.Popen[bytes]]()
    by_torchrun = is_torchelastic_launched()
    server = socket.create_server(("" if by_torchrun else "127.0.0.1", 0))
    port, deadline = server.getsockname()[1], time.monotonic() + _MEETING_SECONDS
    if by_torchrun:
        store, _ = _of_torchrun(size)
        host = getattr(store, "underlying_store", store).host  # the name by which the others reach this machine
        store.set(_MEETING, json.dumps([host, port, key.hex()]))
    else:
        processes += [_started(["127.0.0.1", port, key.hex(), rank, size]) for rank in range(1, size)]
    try:
        others = _met(
            server, key, size, lambda: time.monotonic() < deadline and all(one.poll() is None for one in processes)
        )
    except PeerLost as error:
        _end(processes)
        raise StartupError(f"the {size} processes of tensor_parallel did not meet at port {port}: {error}") from error
    return Peers(TensorShard(0, size), others, partial(_end, processes))


def _started(given: Sequence[object]) -> subprocess.Popen[bytes]:
    """Start a follower on this machine."""
    process = subprocess.Popen([sys.executable, "-m", "service", "follow"], stdin=subprocess.PIPE)
    assert process.stdin is not None, "it was asked for"
    process.stdin.write(json.dumps(given).encode())
    process.stdin.close()
    return process


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """End followers, which have nothing to save, and may be stopped."""
    for one in processes:
        one.kill()
        one.wait()


def follow_leader(given: str) -> None:
    """Follow the leader that has started this process. `given`: what it wrote to the standard input."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the leader, which may go on for a while
        signal.signal(number, signal.SIG_IGN)
    host, port, key, rank, size = json.loads(given)
    peers = meet((host, port), bytes.fromhex(key), TensorShard(rank, size))
    with suppress(PeerLost):  # as the leader's log says
        follow(peers)


def _of_torchrun(size: int) -> tuple[Any, TensorShard]:
    """The store of torchrun's processes, and the place of this one among them. Raises StartupError if they are not
    `size`."""
    store, rank, found = next(rendezvous("env://"))
    if found != size:
        raise StartupError(f"tensor_parallel is {size}, but torchrun has started {found} processes")
    return store, TensorShard(rank, size)


def follows(config: ServiceConfig) -> bool:
    """Follow the leader until it ends, if torchrun has started this process as a follower. Returns whether it has."""
    if config.tensor_parallel == 1 or not is_torchelastic_launched():
        return False
    store, shard = _of_torchrun(config.tensor_parallel)
    if shard.rank:
        follow_leader(json.dumps([*json.loads(store.get(_MEETING)), *shard]))
    return shard.rank > 0


def meet(leader: tuple[str, int], key: bytes, shard: TensorShard) -> Peers:
    """Join the leader at an address, and those followers with which sums are exchanged. Raises PeerLost."""
    try:
        answers = answer_challenge, deliver_challenge
        others = {0: _greeted(socket.create_connection(leader), key, *answers)}
        with socket.socket(fileno=os.dup(others[0].fileno())) as own:
            server = socket.create_server((own.getsockname()[0], 0))
        others[0].send_bytes(json.dumps([shard.rank, *server.getsockname()[:2]]).encode())
        addresses = json.loads(others[0].recv_bytes())
        partners = [shard.rank ^ distance for distance in (1, 2, 4) if distance < shard.size]
        for rank in partners:
            if 0 < rank < shard.rank:
                others[rank] = _greeted(socket.create_connection(tuple(addresses[rank - 1])), key, *answers)
                others[rank].send_bytes(bytes([shard.rank]))
        for _ in [rank for rank in partners if rank > shard.rank]:
            other = _accepted(server, key)
            others[other.recv_bytes()[0]] = other
        return Peers(shard, others)
    except (OSError, EOFError, AuthenticationError) as error:
        raise PeerLost(f"the processes that share the model did not meet: {error}") from error


def _met(server: socket.socket, key: bytes, size: int, waits: Callable[[], bool]) -> Mapping[int, Connection]:
    """Wait for the followers and tell them each other's addresses. `waits`: whether they can still come. Raises
    PeerLost."""
    others, addresses = dict[int, Connection](), dict[int, tuple[str, int]]()
    server.settimeout(_POLL_SECONDS)
    while len(others) < size - 1:
        try:
            other = _accepted(server, key)
            rank, *address = json.loads(other.recv_bytes())
        except (OSError, EOFError, AuthenticationError) as error:  # none came, or something else
            if not waits():
                raise PeerLost("it did not start") from error
            continue
        others[rank], addresses[rank] = other, address
    for other in others.values():
        other.send_bytes(json.dumps([addresses[rank] for rank in range(1, size)]).encode())
    return others


def _accepted(server: socket.socket, key: bytes) -> Connection:
    """Accept a connection from a process that has the key."""
    return _greeted(server.accept()[0], key, deliver_challenge, answer_challenge)


def _greeted(found: socket.socket, key: bytes, *greetings: Callable[[Connection, bytes], None]) -> Connection:
    """Make a connection, with little patience for the greetings. One whose other machine has vanished is noticed."""
    found.setblocking(True)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    unread_milliseconds = 1000 * _PATIENCE_SECONDS
    options = {"NODELAY": 1, "KEEPIDLE": 10, "KEEPINTVL": 5, "KEEPCNT": 4, "USER_TIMEOUT": unread_milliseconds}
    for option, value in options.items():
        if hasattr(socket, f"TCP_{option}"):  # not all systems have them
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)
    other = Connection(found.detach())
    set_patience(other, _GREETING_SECONDS)
    for greet in greetings:
        greet(other, key)
    set_patience(other, 0)
    return other
