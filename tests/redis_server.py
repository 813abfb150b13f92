"""A real Redis server on a free port, empty and forgetful, which a test may stop, freeze and begin anew."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import ConnectionError as NotConnected

from benchmarks.fleets import free_port

PATIENCE_SECONDS = 20.0
_SLOTS = 16384
# Nodes that were gone serve after this time, and not only after some seconds.
_AS_NODE = ("--cluster-enabled", "yes", "--cluster-node-timeout", "500")


class RedisServer:
    """The server and, for the test's own use, a client of it."""

    def __init__(self, folder: Path, *more: str) -> None:
        """`more` of its settings."""
        program = shutil.which("redis-server")
        assert program is not None, "this test needs redis-server: apt-get install redis-server"
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client: Any = redis.Redis(port=self.port, protocol=2)  # whose types allow for every way of asking
        self._command = [program, "--port", str(self.port), "--save", "", "--dir", str(folder), "--bind", "127.0.0.1"]
        self._command += more
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start it, empty."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._answers():
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """It keeps its connections and answers no one."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def key(self, name: str) -> bytes:
        """The one key of this name, whatever stands before it."""
        return _key_in(name, [self])

    def end(self) -> None:
        self.client.close()
        if self._process is not None:
            self.kill()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except NotConnected:
            return False


def _key_in(name: str, servers: "Sequence[RedisServer]") -> bytes:
    found = [key for server in servers for key in server.client.keys(f"*:{name}")]
    assert len(found) == 1, f"{len(found)} keys end in {name}"
    key: bytes = found[0]
    return key


class RedisCluster:
    """Three servers that are one cluster, each with a third of the slots."""

    def __init__(self, folder: Path) -> None:
        self._gossip = [str(free_port()) for _ in range(3)]  # ports
        self.nodes = [
            RedisServer(folder, *_AS_NODE, "--cluster-port", port, "--cluster-config-file", port)
            for port in self._gossip
        ]
        self.url = self.nodes[0].url
        self.client: Any = None

    def begin(self) -> None:
        """Start them, empty; they remember that they are a cluster."""
        for node in self.nodes:
            node.begin()
        if self.client is None:
            for number, node in enumerate(self.nodes):
                node.client.execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].port, self._gossip[0])
                first, end = (_SLOTS * third // 3 for third in (number, number + 1))
                node.client.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(node.client.cluster("INFO")["cluster_state"] == "ok" for node in self.nodes):
            assert time.monotonic() < deadline, "the nodes do not become a cluster"
            time.sleep(0.02)
        self.client = self.client or redis.RedisCluster(host="127.0.0.1", port=self.nodes[0].port, protocol=2)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def freeze(self) -> None:
        for node in self.nodes:
            node.freeze()

    def thaw(self) -> None:
        for node in self.nodes:
            node.thaw()

    def key(self, name: str) -> bytes:
        return _key_in(name, self.nodes)

    def move(self, key: str) -> None:
        """Another node gets the key's slot, with all that is in it."""
        slot = self.client.keyslot(key)
        source, goal, *_ = sorted(self.nodes, key=lambda node: -int(node.client.cluster("COUNTKEYSINSLOT", slot)))
        goal.client.cluster("SETSLOT", slot, "IMPORTING", source.client.cluster("MYID"))
        source.client.cluster("SETSLOT", slot, "MIGRATING", goal.client.cluster("MYID"))
        keys = source.client.cluster("GETKEYSINSLOT", slot, 1000)
        source.client.execute_command("MIGRATE", "127.0.0.1", goal.port, "", 0, 5000, "KEYS", *keys)
        for node in (goal, source):
            node.client.cluster("SETSLOT", slot, "NODE", goal.client.cluster("MYID"))

    def end(self) -> None:
        for node in self.nodes:
            node.end()


Redis = RedisServer | RedisCluster


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    server.begin()
    try:
        yield server
    finally:
        server.end()


@contextmanager
def redis_cluster(folder: Path) -> Iterator[RedisCluster]:
    cluster = RedisCluster(folder)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.end()
