"""Starts the processes that share a model, `tensor_parallel` of them, or meets those that torchrun has started.

The leader loads its part, serves, and tells the others what to load. Followers end with the leader. If one ends or does
not answer any more, the leader's engine fails, as at any other fault of an engine.
"""

import ctypes
import json
import logging
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
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
from service.engine.peers import Peers
from service.engine.shards import ModelShard
from service.engine.target import Target
from service.engine.weights import Described, LoadedModel, describe, kv_shape, load_weights
from service.errors import PeerLost, StartupError

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_LOOPBACK = "127.0.0.1"
_MEETING = "adaptree"  # key of the leader's address in torchrun's store
_KEY_BYTES = 32
_PATIENCE_SECONDS = 30  # for which the leader waits for a part of a layer; it computes one just as long
_POLL_SECONDS = 0.2
_ENDING_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1  # Linux's prctl: the signal that a process gets when the thread that started it ends

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class SharedModel:
    """What a follower loads, and by what it computes."""

    build: str  # versions and kernels, which must be the leader's
    model: str
    revision: str | None
    unverified: bool
    max_model_len: int | None
    dtype: str
    in_blocks: bool
    in_8_bits: bool
    threads: int

    @staticmethod
    def of(config: ServiceConfig, dtype: torch.dtype, *, in_blocks: bool, in_8_bits: bool) -> "SharedModel":
        """What the processes of this configuration load, in this type."""
        return SharedModel(
            build=build_name(),
            model=config.model_source,
            revision=config.revision,
            unverified=config.unverified,
            max_model_len=config.max_model_len,
            dtype=str(dtype).removeprefix("torch."),
            in_blocks=in_blocks,
            in_8_bits=in_8_bits,
            threads=config.num_threads,
        )

    @property
    def described(self) -> Described:
        """The model's configuration and files. Raises StartupError."""
        return describe(
            self.model, revision=self.revision, unverified=self.unverified, max_model_len=self.max_model_len
        )


def build_name() -> str:
    """Versions and kernels on which the bits of a forward depend."""
    return f"adaptree {__version__}, torch {torch.__version__}, {ops.kernel_set(_CPU)} on {platform.machine()}"


def load_shared(
    config: ServiceConfig, device: torch.device, what: SharedModel, load: Callable[..., LoadedModel]
) -> LoadedModel:
    """Start the followers and load the leader's part, while they load theirs. `load`: loads a part. Raises
    StartupError."""
    refuse_sharing(device)
    part = ModelShard.of(what.described.config, TensorShard(0, config.tensor_parallel))
    try:
        peers = _lead(config.tensor_parallel)
        peers.say(json.dumps(asdict(what)))
        loaded = load(part=part)
        peers.say(part.digest())
        peers.total(0)  # all have loaded theirs
    except PeerLost as error:
        raise StartupError(f"one of the {part.shard.size} processes that share the model has ended: {error}") from error
    peers.wait_at_most(_PATIENCE_SECONDS)
    return replace(loaded, peers=peers)


def refuse_sharing(device: torch.device) -> None:
    """Raise StartupError if processes cannot share a model on such devices."""
    if device.type != "cpu" or ops.kernel_set(device) == "torch":
        raise StartupError(
            f"tensor_parallel is more than 1 on {device}: only the compiled kernels of CPUs share a model yet; set "
            "tensor_parallel to 1, or device to cpu"
        )


def follow(peers: Peers) -> None:
    """Load this process's part of the model, and compute it until the leader ends. Raises StartupError, and PeerLost if
    the leader does not end as it should."""
    what = SharedModel(**json.loads(peers.say()))
    use_threads(what.threads)
    if what.build != build_name():
        raise StartupError(f"the leader runs {what.build}, but this process {build_name()}: install the same")
    described = what.described
    part, dtype = ModelShard.of(described.config, peers.shard), getattr(torch, what.dtype)
    model = load_weights(described, dtype, _CPU, in_blocks=what.in_blocks, part=part)
    if peers.say() != part.digest():
        raise StartupError(f"{what.model} has other weights here than where the leader runs: copy the same files")
    peers.total(0)
    shape = kv_shape(model, part)
    target = Target(model, KVPool(shape, 2, _CPU), part, peers, in_8_bits=what.in_8_bits)
    logger.info("process %d of %d has its part of the model", peers.shard.rank + 1, peers.shard.size)
    compute(target)


@torch.inference_mode()
def compute(target: Target) -> None:
    """Compute a follower's part of the leader's forwards until it ends. Raises PeerLost."""
    for forward in target.peers.heard():
        slots, places = forward.sizes.pool
        if (slots, places) != (target.pool.num_slots, target.pool.num_places):
            target.pool = KVPool(target.pool.shape, slots, target.device, num_places=places)
        target.pool.window_of = forward.window_of
        # Tokens are not sent: the leader looks up their embeddings.
        target.compute(forward.slots, *forward[1:-1], features=False)


def _lead(size: int) -> Peers:
    key = secrets.token_bytes(_KEY_BYTES)
    if is_torchelastic_launched():
        store, shard = _of_torchrun(size)
        server = _server(socket.gethostname())
        store.set(_MEETING, json.dumps([*server.getsockname()[:2], key.hex()]))
        return Peers(shard, _met(server, key, size, lambda: True))
    server = _server(_LOOPBACK)
    followers = Followers(server.getsockname()[:2], key, size)
    followers.start()
    return Peers(TensorShard(0, size), _met(server, key, size, followers.is_alive), followers.end)


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
        host, port, key = json.loads(store.get(_MEETING))
        follow(meet((host, port), bytes.fromhex(key), shard))
    return shard.rank > 0


def meet(leader: Address, key: bytes, shard: TensorShard) -> Peers:
    """Join the leader at an address, and those followers with which sums are exchanged. Raises PeerLost."""
    try:
        others = {0: _connected(leader, key)}
        with socket.socket(fileno=os.dup(others[0].fileno())) as own:
            server = _server(own.getsockname()[0])
        others[0].send_bytes(json.dumps([shard.rank, *server.getsockname()[:2]]).encode())
        addresses = json.loads(others[0].recv_bytes())
        partners = [shard.rank ^ distance for distance in (1, 2, 4) if distance < shard.size]
        for rank in partners:
            if 0 < rank < shard.rank:
                others[rank] = _connected(tuple(addresses[rank - 1]), key)
                others[rank].send_bytes(bytes([shard.rank]))
        for _ in [rank for rank in partners if rank > shard.rank]:
            other = _accepted(server, key)
            others[other.recv_bytes()[0]] = other
        return Peers(shard, others)
    except (OSError, EOFError) as error:
        raise PeerLost(f"the processes that share the model did not meet: {error}") from error


def _met(server: socket.socket, key: bytes, size: int, waits: Callable[[], bool]) -> Mapping[int, Connection]:
    """Wait for the followers and tell them each other's addresses. `waits`: whether they can still come. Raises
    PeerLost."""
    others, addresses = dict[int, Connection](), dict[int, Address]()
    server.settimeout(_POLL_SECONDS)
    while len(others) < size - 1:
        try:
            other = _accepted(server, key)
            rank, *address = json.loads(other.recv_bytes())
        except TimeoutError as error:
            if not waits():
                raise PeerLost("it did not start") from error
            continue
        except (OSError, EOFError) as error:
            raise PeerLost(str(error)) from error
        others[rank], addresses[rank] = other, address
    for other in others.values():
        other.send_bytes(json.dumps([addresses[rank] for rank in range(1, size)]).encode())
    return others


def _server(host: str) -> socket.socket:
    return socket.create_server((host, 0))


def _accepted(server: socket.socket, key: bytes) -> Connection:
    """Accept a connection from a process that has the key."""
    found, _ = server.accept()
    other = _connection(found)
    deliver_challenge(other, key)
    answer_challenge(other, key)
    return other


def _connected(address: Address, key: bytes) -> Connection:
    other = _connection(socket.create_connection(address))
    answer_challenge(other, key)
    deliver_challenge(other, key)
    return other


def _connection(found: socket.socket) -> Connection:
    found.setblocking(True)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(found.detach())


class Followers(threading.Thread):
    """Starts the followers on this machine, and waits until one ends; then it ends the others. They end with this
    thread, which lasts as long as the process."""

    def __init__(self, leader: Address, key: bytes, size: int) -> None:
        super().__init__(name="followers", daemon=True)
        self._leader, self._key, self._size = leader, key, size
        self._ending = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        for rank in range(1, self._size):
            process = subprocess.Popen([sys.executable, "-m", "service", "follow"], stdin=subprocess.PIPE)
            assert process.stdin is not None, "it was asked for"
            process.stdin.write(json.dumps([self._leader, self._key.hex(), rank, self._size]).encode())
            process.stdin.close()
            self._processes.append(process)
        while not self._ending.wait(_POLL_SECONDS) and all(one.poll() is None for one in self._processes):
            pass
        if not self._ending.is_set():
            rank = next(rank for rank, one in enumerate(self._processes, 1) if one.poll() is not None)
            logger.error("process %d of the %d that share the model has ended", rank + 1, self._size)
        for one in self._processes:
            try:
                one.wait(_ENDING_SECONDS if self._ending.is_set() else 0)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()

    def end(self) -> None:
        """Let the followers end; those that do not on their own are killed a little later."""
        self._ending.set()


def follow_leader(given: str) -> None:
    """Follow the leader that has started this process. `given`: what it wrote to the standard input."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # one that is stopped sees no connection close
    leader, key, rank, size = json.loads(given)
    follow(meet(tuple(leader), bytes.fromhex(key), TensorShard(rank, size)))
