"""A real Redis server on a free port, empty and forgetful, which a test may stop, freeze and begin anew."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError as NotConnected

from benchmarks.fleets import free_port

PATIENCE_SECONDS = 20.0


class RedisServer:
    """The server and, for the test's own use, a client of it."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        assert program is not None, "this test needs redis-server: apt-get install redis-server"
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client: Any = Redis(port=self.port, protocol=2)  # whose types allow for every way of asking
        self._command = [program, "--port", str(self.port), "--save", "", "--dir", str(folder), "--bind", "127.0.0.1"]
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
        """It keeps its connections and answers nobody."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def key(self, name: str) -> bytes:
        """The one key of this name, whatever stands before it."""
        found: list[bytes] = self.client.keys(f"*:{name}")
        assert len(found) == 1, f"{len(found)} keys end in {name}"
        return found[0]

    def end(self) -> None:
        self.client.close()
        if self._process is not None:
            self.kill()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except NotConnected:
            return False


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    server.begin()
    try:
        yield server
    finally:
        server.end()
