"""Clients of servers: requests, answers, and whether an answer is that of an idle server."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from service.bench.experiment import count_mismatches
from service.errors import StartupError
from service.ingress.forwarding import GOES_ON

PATIENCE_SECONDS = 300.0
_GOES_ON = GOES_ON.decode().strip()
_REST_SECONDS = 60.0
_POLL_SECONDS = 0.1
_BUSY = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["question", "answer"]}, "marks": {"type": "array", "items": {"type": "integer"}}},
    "required": ["kind", "marks"],
    "additionalProperties": False,
}
_VARIANTS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "n": 2},
    {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.3},
    {
        "temperature": 1.0,
        "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "note", "schema": _SCHEMA}},
    },
)
"""Parameters of the questions, in turn."""


@dataclass(slots=True)
class Received:
    """The answer to one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)  # by choice
    ends: dict[int, str] = field(default_factory=dict)  # why a choice ended, by choice
    completion_tokens: int | None = None  # as the usage says
    is_complete: bool = False
    failure: str | None = None
    seconds: list[float] = field(default_factory=list, compare=False)  # of each event, since it was asked
    resumed_after: list[int] = field(default_factory=list, compare=False)  # events before another server took over

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(map(len, self.tokens.values()))

    @property
    def seconds_to_go_on(self) -> list[float]:
        """Seconds from the last event of a server that broke off to the next event, for each break."""
        times = [0.0, *self.seconds]
        return [times[count + 1] - times[count] for count in self.resumed_after if count + 1 < len(times)]

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Add a chunk of a stream, or a whole answer."""
        if "error" in chunk:
            self.failure = str(chunk["error"])
            return
        for choice in chunk["choices"]:
            self.tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
            if choice["finish_reason"]:
                self.ends[choice["index"]] = choice["finish_reason"]
        if chunk.get("usage"):
            self.completion_tokens = chunk["usage"]["completion_tokens"]

    def differs(self, expected_answer: "Received") -> int:
        """Count tokens that differ from the expected answer, up to the end of this one; another end counts one."""
        count = 0
        for choice, expected in expected_answer.tokens.items():
            got = self.tokens.get(choice, [])
            count += count_mismatches(expected if self.is_complete else expected[: len(got)], got)
        if self.is_complete:
            totals = self.completion_tokens != expected_answer.completion_tokens
            count += int(self.ends != expected_answer.ends) + totals
        return count


def questions(model: str, prompts: Sequence[Sequence[Mapping[str, str]]], max_tokens: int) -> list[dict[str, Any]]:
    """Return bodies of chat completions with several sampling parameters; each determines its answer."""
    fields = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return [
        {**fields, "messages": messages, "seed": number, **_VARIANTS[number % len(_VARIANTS)]}
        for number, messages in enumerate(prompts)
    ]


async def metric(client: httpx.AsyncClient, url: str, name: str) -> float:
    """Return the value of a metric without labels."""
    page = (await client.get(f"{url}/metrics")).text
    (value,) = re.findall(rf"^adaptree_{name} (\S+)$", page, re.MULTILINE)
    return float(value)


async def slots_at_rest(client: httpx.AsyncClient, url: str) -> float:
    """Return the share of slots still in use once no request runs, waiting a minute at most."""
    deadline = time.monotonic() + _REST_SECONDS
    while time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
        if not any([await metric(client, url, name) for name in _BUSY]):
            return 0.0
    return await metric(client, url, "kv_cache_usage_perc")


async def answers_alone(client: httpx.AsyncClient, url: str, bodies: Sequence[Mapping[str, Any]]) -> list[Received]:
    """Send the requests one by one; return the answers. Raises StartupError for a request that fails."""
    told = []
    for number, body in enumerate(bodies, start=1):
        said = await ask(client, url, body)
        if said.failure is not None:
            raise StartupError(f"prompt {number} is not answered: {said.failure}")
        told.append(said)
    return told


async def ask(
    client: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    *,
    leaves_after: int | None = None,
    heard: Callable[[], None] = lambda: None,
) -> Received:
    """Send a request; return its answer, up to where the client leaves; `heard` is called at each event."""
    said, began = Received(), time.monotonic()
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS) as answer:
            if answer.status_code != 200:
                said.failure = f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:500]}"
            elif not body.get("stream"):
                said.take(json.loads(await answer.aread()))
                said.is_complete = True
            else:
                await _listen(answer, said, began, leaves_after, heard)
    except httpx.HTTPError as error:
        said.failure = f"{type(error).__name__}: {error}"
    if said.failure is None and not said.is_complete and leaves_after is None:
        said.failure = "the stream broke off"
    return said


async def _listen(
    answer: httpx.Response, said: Received, began: float, leaves_after: int | None, heard: Callable[[], None]
) -> None:
    async for line in answer.aiter_lines():
        if line == _GOES_ON:
            said.resumed_after.append(len(said.seconds))
        if not line.startswith("data: "):
            continue
        said.seconds.append(time.monotonic() - began)
        heard()
        if line == "data: [DONE]":
            said.is_complete = said.failure is None
            return
        said.take(json.loads(line.removeprefix("data: ")))
        if leaves_after is not None and said.num_tokens >= leaves_after:
            return
