"""Server processes, and an HTTP client that measures their answers.

While a server works, its client only records bytes and their arrival times, and parses them afterwards, because both
share the CPU cores."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
import psutil
import yaml

from service.bench.driver import Answer, Run
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
    """A running program, and the file that its output goes to."""

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
        """Text after `ready:` in the log; waits for it. Raises StartupError if the process ends before."""
        came_true(lambda: _READY.search(self.log.read_text()) or self.running.poll() is not None)
        if found := _READY.search(self.log.read_text()):
            return found[1]
        self.kill()
        raise StartupError(f"{self.name} did not become ready:\n{self.log.read_text()[-4000:]}")

    @property
    def url(self) -> str:
        """The server's address; waits until it is ready. Raises StartupError."""
        return self.ready.removesuffix("/v1")

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self.running.kill()
        self.running.wait()

    def end(self) -> None:
        """Send SIGTERM, and wait until the process has shut down gracefully."""
        if self.running.poll() is None:
            self.running.send_signal(signal.SIGTERM)
            assert self.running.wait(PATIENCE_SECONDS) in (0, -signal.SIGTERM), self.log.read_text()[-4000:]


@dataclass(frozen=True)
class Servers:
    """Starts server processes of one configuration, which listen on 127.0.0.1 without API keys. Their settings and logs
    are in `folder`."""

    config: ServiceConfig
    folder: Path

    def begin(self, name: str, port: int = 0, **changes: Any) -> Process:
        """Start a server with changed settings; `name` must be unique in the folder."""
        given = self.config.model_dump(mode="json", exclude_unset=True, exclude=_SECRETS)
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**given, **changes}))
        command = [*ADAPTREE, "serve", "--config", str(file), *_OPEN, "--port", str(port)]
        return Process.begin(name, command, self.folder / f"{name}.log")


@contextmanager
def one_server(config: ServiceConfig, **changes: Any) -> Iterator[Process]:
    """Start a server with changed settings; shut it down after the block, or kill it after an error."""
    with TemporaryDirectory() as folder:
        server = Servers(config, Path(folder)).begin("server", **changes)
        try:
            yield server
            server.end()
        finally:
            server.kill()


def came_true(condition: Callable[[], object]) -> bool:
    """Wait until a condition holds; returns False if it does not within PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (is_true := bool(condition())) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return is_true


UNKNOWN = -1
"""Stands for each token of a server that sends no token ids."""

Json = Mapping[str, Any]
Part = tuple[float, bytes]
"""Bytes of a response, and the seconds from sending the request to their arrival."""

_TEXTS = ("text", "content", "reasoning_content", "reasoning")
_MOST_BYTES = 1 << 16  # bytes read at once


class HttpClient:
    """Sends requests to one server and measures its answers. Raises StartupError, naming the server, if that fails."""

    def __init__(self, name: str, url: str, *, stream: bool, api_key: str = "none", pid: int | None = None) -> None:
        """`pid`: id of the server's process, if it runs on this machine."""
        self.spent = np.zeros(2)  # context switches and CPU seconds of the server while it answered
        self._name, self._pid, self._where = name, pid, urlsplit(url.rstrip("/").removesuffix("/v1"))
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        self._fields: Json = {"return_token_ids": True, **options}

    @cached_property
    def _model(self) -> str:
        return str(json.loads(b"".join(part for _, part in self._ask("GET", "/v1/models")))["data"][0]["id"])

    def send(self, bodies: Sequence[Json], num_clients: int) -> Run:
        """Send request bodies, `num_clients` at a time; those with messages are chat completions."""
        completed = [{"model": self._model, **self._fields, **body} for body in bodies]
        with ThreadPoolExecutor(num_clients) as clients:
            before, start = spent_by(self._pid), time.perf_counter()
            received = list(clients.map(self._send_one, completed))
            seconds = time.perf_counter() - start
        self.spent += spent_by(self._pid) - before
        return Run(tuple(answer_of(self._name, parts) for parts in received), (), seconds)

    def _send_one(self, body: Json) -> list[Part]:
        return self._ask("POST", "/v1/chat/completions" if "messages" in body else "/v1/completions", body)

    def _ask(self, method: str, path: str, body: Json | None = None) -> list[Part]:
        kind = HTTPSConnection if self._where.scheme == "https" else HTTPConnection
        with closing(kind(self._where.netloc, timeout=PATIENCE_SECONDS)) as connection:
            start, parts = time.perf_counter(), list[Part]()
            try:
                connection.request(method, self._where.path + path, json.dumps(body), self._headers)
                reply = connection.getresponse()
                while part := reply.read1(_MOST_BYTES):
                    parts.append((time.perf_counter() - start, part))
            except (OSError, HTTPException) as error:
                raise StartupError(f"{self._name} does not answer: {error!r}") from error
        if reply.status >= HTTPStatus.BAD_REQUEST:
            raise StartupError(f"{self._name} answers {reply.status}: {parts[:9]}")
        return parts


def answer_of(server: str, parts: Sequence[Part]) -> Answer:
    """Parse an answer that arrived whole or in chunks; its gaps are between chunks with text. Raises StartupError if it
    has no text or no token counts."""
    texts = [(seconds, line.removeprefix(b"data:").strip()) for seconds, line in _lines(parts)]
    chunks = [(seconds, json.loads(text)) for seconds, text in texts if text.startswith(b"{")]
    choices = [(seconds, choice) for seconds, chunk in chunks for choice in chunk.get("choices", ())]
    pieces = [
        (seconds, choice.get("token_ids") or [])
        for seconds, choice in choices
        if choice.get("token_ids") or _text_of(choice)
    ]
    total = next((chunk for _, chunk in chunks[::-1] if chunk.get("usage")), None)
    if total is None or not pieces:
        raise StartupError(f"{server} sent no text or no token counts; last chunk: {chunks[-1:]}")
    count, times = total["usage"]["completion_tokens"], [seconds for seconds, _ in pieces]
    record = (total.get("metrics") or {}).get("speculative_decoding") or {}
    return Answer(
        tuple(chain.from_iterable(token_ids for _, token_ids in pieces)) or (UNKNOWN,) * count,
        "".join(_text_of(choice) for _, choice in choices),
        accepted_per_step=tuple(
            length for length, steps in enumerate(record.get("acceptance_histogram", ())) for _ in range(steps)
        ),
        first_token_seconds=times[0],
        gaps_seconds=tuple(after - before for before, after in pairwise(times)),
        first_tokens=count if len(times) == 1 else len(pieces[0][1]) or 1,
        prompt_tokens=total["usage"]["prompt_tokens"],
    )


def _lines(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield each line with the time at which it was complete. Only line feeds end a line, since other separators may
    occur inside a JSON string."""
    rest = b""
    for seconds, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from ((seconds, line) for line in lines)
    yield seconds, rest


def _text_of(choice: Json) -> str:
    content = choice.get("delta") or choice.get("message") or choice
    return "".join(content.get(name) or "" for name in _TEXTS)


def spent_by(pid: int | None) -> np.ndarray:
    """Return the context switches of a process's threads (counted on Linux only), and its CPU seconds."""
    threads = "".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/status"))
    times = psutil.Process(pid).cpu_times()
    return np.array([sum(map(int, re.findall(r"ctxt_switches:\s*(\d+)", threads))), times.user + times.system])
