"""The whole server on the embedded model: many streams, a third of them leaving at random."""

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx2 as httpx
import pytest

from service.bench.lossless import BUILT_IN
from tests.processes import begin

pytestmark = pytest.mark.slow

STREAMS = 32
TOKENS = 256


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("soak")
    (folder / "soak.yaml").write_text("port: 0\n")
    server = begin(["serve"], folder / "soak.yaml", folder / "log")
    try:
        yield server.url
    finally:
        server.end()


@dataclass(frozen=True)
class Stream:
    """One request and after how many tokens its client leaves (None = never)."""

    prompt: str
    seed: int
    leaves_after: int | None

    def body(self) -> dict[str, object]:
        return {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": self.prompt}],
            "temperature": 0.8,
            "seed": self.seed,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }


def streams() -> list[Stream]:
    choice = random.Random(0)
    leavers = set(choice.sample(range(STREAMS), STREAMS // 3))
    prompts = [str(json.loads(line)["turns"][0]) for line in BUILT_IN.read_text(encoding="utf-8").splitlines()]
    return [
        Stream(prompts[i % len(prompts)], i, choice.randrange(1, TOKENS) if i in leavers else None)
        for i in range(STREAMS)
    ]


async def tokens_of(client: httpx.AsyncClient, stream: Stream) -> list[int]:
    """The stream's tokens up to its end, or up to where its client leaves."""
    tokens: list[int] = []
    async with client.stream("POST", "/v1/chat/completions", json=stream.body()) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk
            tokens += [token for one in chunk["choices"] for token in one.get("token_ids") or []]
            if stream.leaves_after is not None and len(tokens) >= stream.leaves_after:
                return tokens
    return tokens


async def metric(client: httpx.AsyncClient, name: str) -> float:
    page = (await client.get("/metrics")).text
    (value,) = re.findall(rf"^{name} (\S+)$", page, re.MULTILINE)
    return float(value)


async def soak(url: str, chosen: Sequence[Stream]) -> tuple[list[list[int]], float, float]:
    """All streams at once: their tokens, steps per second, and the event loop's longest block."""
    limits = httpx.Limits(max_connections=2 * STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await metric(client, "adaptree_event_loop_lag_seconds")  # start-up does not count
        steps, start = await metric(client, "adaptree_engine_steps_total"), time.monotonic()
        found = await asyncio.gather(*(tokens_of(client, stream) for stream in chosen))
        seconds = time.monotonic() - start
        lag = await metric(client, "adaptree_event_loop_lag_seconds")
        rate = (await metric(client, "adaptree_engine_steps_total") - steps) / seconds
        while await metric(client, "adaptree_num_requests_running"):
            await asyncio.sleep(0.05)
        assert await metric(client, "adaptree_kv_cache_usage_perc") == 0
        return found, rate, lag


async def alone(url: str, chosen: Sequence[Stream]) -> list[list[int]]:
    """The same streams one after the other, nobody leaving."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        return [await tokens_of(client, Stream(stream.prompt, stream.seed, None)) for stream in chosen]


def test_streams_that_come_and_go(url: str) -> None:
    chosen = streams()
    found, steps_per_second, lag = asyncio.run(soak(url, chosen))
    expected = asyncio.run(alone(url, chosen))
    print(f"{steps_per_second:.1f} steps/s, event loop blocked for at most {1000 * lag:.1f} ms")
    for stream, tokens, reference in zip(chosen, found, expected, strict=True):
        assert tokens == reference[: len(tokens)]
        assert len(tokens) == TOKENS if stream.leaves_after is None else len(tokens) >= stream.leaves_after
