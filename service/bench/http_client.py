"""A client of an OpenAI server, in a process of its own: requests in, answers with their times out.

While the server works, its client only notes when bytes came. It reads them afterwards, as both share the cores.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property, partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil

from service.bench.driver import Answer, Arrivals, ClosedLoop, PoissonArrivals, Run
from service.bench.processes import PATIENCE_SECONDS
from service.engine.requests import GenerationRequest
from service.errors import StartupError

UNKNOWN = -1
"""Stands for each token of a server that sends no ids."""

Json = Mapping[str, Any]
Part = tuple[float, bytes]
"""Seconds since a request was sent, and what came then."""

_TEXTS = ("text", "content", "reasoning_content", "reasoning")
_SAMPLING = ("seed", "max_tokens", "temperature", "ignore_eos")
_MOST_BYTES = 1 << 16  # that are read at once


class HttpClient:
    """Lets one server answer requests. Raises StartupError, naming the server, where it fails."""

    def __init__(self, name: str, url: str, *, stream: bool, api_key: str = "none", pid: int | None = None) -> None:
        """`pid` is that of a server on this machine."""
        self.spent = np.zeros(2)  # context switches and CPU seconds of that process while it answered
        self._name, self._pid, self._where = name, pid, urlsplit(url.rstrip("/").removesuffix("/v1"))
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        self._fields: Json = {"return_token_ids": True, **options}

    @cached_property
    def _model(self) -> str:
        return str(json.loads(b"".join(part for _, part in self._ask("GET", "/v1/models")))["data"][0]["id"])

    def __call__(self, requests: Sequence[GenerationRequest]) -> Run:
        """Send all requests at once, their prompts as token ids."""
        sampling = [{name: getattr(request.sampling, name) for name in _SAMPLING} for request in requests]
        bodies = [{"prompt": [*request.prompt], **how} for request, how in zip(requests, sampling, strict=True)]
        return self.send(bodies, ClosedLoop(len(bodies)))

    def send(self, bodies: Sequence[Json], arrivals: Arrivals) -> Run:
        """Send the bodies of completions, or of chat completions where they hold messages: as many at a time as there
        are clients, or at random times."""
        numbered = list(enumerate({"model": self._model, **self._fields, **body} for body in bodies))
        at_random = isinstance(arrivals, PoissonArrivals)
        with ThreadPoolExecutor(len(bodies) if at_random else arrivals.due(0.0, 0)) as clients:
            before, start = spent_by(self._pid), time.perf_counter()
            received = list(clients.map(partial(self._send_one, arrivals, start), numbered))
            seconds = time.perf_counter() - start
        self.spent += spent_by(self._pid) - before
        return Run(tuple(answer_of(self._name, parts) for parts in received), (), seconds)

    def _send_one(self, arrivals: Arrivals, start: float, numbered: tuple[int, Json]) -> list[Part]:
        number, body = numbered
        time.sleep(max(0.0, start + arrivals.since(number, 0.0) - time.perf_counter()))
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
    """Read an answer, whole or in chunks; its gaps are those between chunks with text. Raises StartupError where it
    ends in an error."""
    texts = [(seconds, line.removeprefix(b"data:").strip()) for seconds, line in _lines(parts)]
    chunks = [(seconds, json.loads(text)) for seconds, text in texts if text.startswith(b"{")]
    choices = [(seconds, choice) for seconds, chunk in chunks for choice in chunk.get("choices", ())]
    pieces = [(seconds, choice.get("token_ids") or []) for seconds, choice in choices if _has_text(choice)]
    total = next((chunk for _, chunk in chunks[::-1] if chunk.get("usage")), None)
    if total is None or not pieces:
        raise StartupError(f"{server} sent no text, or not how many tokens it has; at last: {chunks[-1:]}")
    count, times = total["usage"]["completion_tokens"], [seconds for seconds, _ in pieces]
    record = (total.get("metrics") or {}).get("speculative_decoding") or {}
    return Answer(
        tuple(chain.from_iterable(token_ids for _, token_ids in pieces)) or (UNKNOWN,) * count,
        accepted_per_step=tuple(
            length for length, steps in enumerate(record.get("acceptance_histogram", ())) for _ in range(steps)
        ),
        first_token_seconds=times[0],
        gaps_seconds=tuple(after - before for before, after in pairwise(times)),
        first_tokens=count if len(times) == 1 else len(pieces[0][1]) or 1,
        prompt_tokens=total["usage"]["prompt_tokens"],
    )


def _lines(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield each line, and when it was complete. Only line feeds end one: others may occur inside a string."""
    rest = b""
    for seconds, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from ((seconds, line) for line in lines)
    yield seconds, rest


def _has_text(choice: Json) -> bool:
    content = choice.get("delta") or choice.get("message") or choice
    return bool(choice.get("token_ids")) or any(map(content.get, _TEXTS))


def spent_by(pid: int | None) -> np.ndarray:
    """Return context switches of a process's threads, which only Linux counts, and its CPU seconds."""
    threads = "".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/status"))
    times = psutil.Process(pid).cpu_times()
    return np.array([sum(map(int, re.findall(r"ctxt_switches:\s*(\d+)", threads))), times.user + times.system])
