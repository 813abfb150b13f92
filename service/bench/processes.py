"""Server processes: start with settings, wait until ready, kill, or end by SIGTERM."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import yaml

from service.config import ServiceConfig
from service.errors import StartupError

PATIENCE_SECONDS = 900.0
ADAPTREE = (sys.executable, "-m", "service")
_READY = re.compile(r"ready: (\S+)")
_POLL_SECONDS = 0.1
_SECRETS = {"api_keys", "admin_key"}
_OPEN = ("--host", "127.0.0.1", "--api-keys", "", "--open-metrics")


@dataclass
class Process:
    """A running program and its log."""

    name: str
    log: Path
    running: subprocess.Popen[bytes]

    @classmethod
    def begin(cls, name: str, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None) -> Self:
        """Start a command whose output goes to `log`."""
        with log.open("w") as stream:
            return cls(name, log, subprocess.Popen(command, stdout=stream, stderr=stream, env=environ))

    @cached_property
    def ready(self) -> str:
        """The text after `ready:` in the log, once it is there. Raises StartupError if the process ends before."""
        came_true(lambda: _READY.search(self.log.read_text()) or self.running.poll() is not None)
        if found := _READY.search(self.log.read_text()):
            return found[1]
        self.kill()
        raise StartupError(f"{self.name} did not become ready:\n{self.log.read_text()[-4000:]}")

    @property
    def url(self) -> str:
        """The server's address, once it is ready."""
        return self.ready.removesuffix("/v1")

    def kill(self) -> None:
        """End the process at once."""
        self.running.kill()
        self.running.wait()

    def end(self) -> None:
        """Send SIGTERM, and wait until the process has shut down in order."""
        if self.running.poll() is None:
            self.running.send_signal(signal.SIGTERM)
            assert self.running.wait(PATIENCE_SECONDS) in (0, -signal.SIGTERM), self.log.read_text()[-4000:]


@dataclass(frozen=True)
class Servers:
    """Server processes of one configuration, on this machine only and without API keys.

    `folder` is for their settings and logs.
    """

    config: ServiceConfig
    folder: Path

    def begin(self, name: str, port: int = 0, **changes: Any) -> Process:
        """Start a server with changed settings. Each name is used once."""
        given = self.config.model_dump(mode="json", exclude_unset=True, exclude=_SECRETS)
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**given, **changes}))
        command = [*ADAPTREE, "serve", "--config", str(file), *_OPEN, "--port", str(port)]
        return Process.begin(name, command, self.folder / f"{name}.log")


@contextmanager
def one_server(config: ServiceConfig, **changes: Any) -> Iterator[Process]:
    """Start a server with changed settings; end it in order after the block, and kill it after an error."""
    with TemporaryDirectory() as folder:
        server = Servers(config, Path(folder)).begin("server", **changes)
        try:
            yield server
            server.end()
        finally:
            server.kill()


def came_true(condition: Callable[[], object]) -> bool:
    """Wait until a condition holds; return False after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (is_true := bool(condition())) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return is_true
