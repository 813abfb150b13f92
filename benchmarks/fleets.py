"""Several servers behind one address, each of which can be killed and restarts: plain processes, or Ray."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from service.bench.servers import ADAPTREE, PATIENCE_SECONDS, Process, Servers, came_true
from service.config_sources import flat_values
from service.errors import StartupError

_RAY_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}  # no reports, no files in the home


class Fleet(Protocol):
    """Several servers behind one address."""

    @property
    def url(self) -> str:
        """The common address."""

    def kill_one(self, rng: random.Random) -> None:
        """Kill a random server without warning; return once all are ready again."""


@dataclass
class Processes:
    """Server processes behind an ingress process."""

    servers: Servers
    ports: tuple[int, ...]
    replicas: list[Process]
    front: Process
    num_killed: int = 0

    @property
    def url(self) -> str:
        """As `Fleet`."""
        return self.front.url

    def kill_one(self, rng: random.Random) -> None:
        """As `Fleet`."""
        number = rng.randrange(len(self.replicas))
        self.replicas[number].kill()
        self.num_killed += 1
        name = f"replica-{number}-again-{self.num_killed}"
        self.replicas[number] = self.servers.begin(name, self.ports[number])
        assert self.replicas[number].ready


@contextmanager
def processes(servers: Servers, count: int) -> Iterator[Processes]:
    """Start servers behind an ingress; all are ready inside the block. The first one fills the caches of the others."""
    ports = tuple(free_port() for _ in range(count))
    with ExitStack() as stack:
        replicas: list[Process] = []
        stack.callback(_kill, replicas)
        for number, port in enumerate(ports):
            replicas.append(servers.begin(f"replica-{number}", port))
            assert replicas[0].ready
        urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        command = [*ADAPTREE, "ingress", "--port", "0", "--replicas", urls]
        front = Process.begin("ingress", command, servers.folder / "ingress.log")
        stack.callback(front.kill)
        assert all(process.ready for process in (*replicas, front))
        yield Processes(servers, ports, replicas, front)
        for process in (front, *replicas):
            process.end()


def _kill(replicas: Sequence[Process]) -> None:
    for one in replicas:
        one.kill()


@dataclass
class OnRay:
    """Replicas of Ray Serve, on a Ray cluster of their own."""

    running: subprocess.Popen[str]
    count: int  # of replicas
    settings: Mapping[str, Any]
    log: Path
    url: str = ""

    def next_line(self, word: str) -> str:
        """Return the next output line that starts with `word`, or nothing if output ends."""
        assert self.running.stdout is not None
        return next((line.strip() for line in self.running.stdout if line.startswith(word)), "")

    def update(self, **changes: object) -> None:
        """Change settings in a rolling update."""
        self._tell({**self.settings, **changes}, "updated")

    def replicas(self) -> set[int]:
        """Return the process ids of the replicas."""
        return {one.pid for one in self._processes()}

    def kill_one(self, rng: random.Random) -> None:
        """As `Fleet`."""
        killed = rng.choice(sorted(self.replicas()))
        os.kill(killed, signal.SIGKILL)
        if not came_true(lambda: len(self.replicas() - {killed}) >= self.count):
            raise StartupError("Ray does not replace a replica that was killed")
        self._tell(None, "all run")

    def _tell(self, settings: Mapping[str, Any] | None, answer: str) -> None:
        assert self.running.stdin is not None
        self.running.stdin.write(json.dumps(settings) + "\n")
        self.running.stdin.flush()
        if not self.next_line(answer):
            raise StartupError(f"replicas on Ray do not serve again:\n{self.log.read_text()[-4000:]}")

    def _processes(self) -> list[psutil.Process]:
        found = psutil.Process(self.running.pid).children(recursive=True)
        return [one for one in found if "ServeReplica:default:Replica" in " ".join(_words(one))]


@contextmanager
def on_ray(servers: Servers, count: int, python: str = sys.executable, **environ: str) -> Iterator[OnRay]:
    """Start replicas on Ray with an interpreter that has it. Raises StartupError."""
    given = servers.config.model_dump(mode="json", exclude_unset=True)
    settings = {name: value for name, value in flat_values(given).items() if name not in ("host", "port")}
    command = [python, "-m", "benchmarks.ray_site", str(free_port()), str(count), json.dumps(settings)]
    pipe, log = subprocess.PIPE, servers.folder / "ray.log"
    environ = {**os.environ, **_RAY_SETTINGS, **environ}
    with (
        log.open("w") as stream,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stream, text=True, env=environ) as running,
    ):
        fleet = OnRay(running, count, settings, log)
        try:
            fleet.url = fleet.next_line("ready: ").removeprefix("ready: ").removesuffix("/v1")
            if not fleet.url:
                raise StartupError(f"replicas on Ray did not become ready:\n{log.read_text()[-4000:]}")
            yield fleet
            assert running.stdin is not None
            running.stdin.close()
            running.wait(PATIENCE_SECONDS)
        finally:
            running.kill()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
