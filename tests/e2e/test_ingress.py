"""Two server processes behind an ingress process, one of which is killed: every stream is the undisturbed one."""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests import processes
from tests.deploy.programs import free_port
from tests.processes import Process, write_settings
from tests.service.bench.parts import save_two_layers
from tests.tiny_models import served_by

pytestmark = pytest.mark.anyio

NUM_STREAMS = 8
TOKENS = 120
ASK = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": TOKENS,
    "n": 2,
    "ignore_eos": True,
    "return_token_ids": True,
}
Said = dict[str, list[Any]]


@dataclass(frozen=True)
class Site:
    replicas: Sequence[Process]
    front: Process


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("ingress")
    model = save_two_layers(folder / "model")
    ports = [free_port() for _ in range(2)]
    urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    with ExitStack() as stack:
        replicas = [replica(folder, model, port) for port in ports]
        words = ("ingress", "--port", "0", "--replicas", urls)
        front = processes.begin(words, None, folder / "ingress.log", program=(sys.executable, "-m", "service"))
        for process in (*replicas, front):
            stack.callback(process.kill)
        assert all(process.ready for process in (*replicas, front))
        yield Site(replicas, front)
        front.end()


def replica(folder: Path, model: Path, port: int) -> Process:
    config = folder / f"replica-{port}.yaml"
    state = str(folder / "state")
    words = write_settings(config, served_by(model, drafter="lookup", max_model_len=512, state_dir=state, port=port))
    return processes.begin(("serve",), config, folder / f"replica-{port}.log", program=words)


async def stream(client: httpx2.AsyncClient, url: str, number: int, events: list[int]) -> Said:
    """What it says; `events` grows by one for each of them."""
    said: Said = {"0": [], "1": [], "ends": [], "usage": []}
    body = {**ASK, "messages": [{"role": "user", "content": f"{number} is the other"}], "seed": number}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = []
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
                events.append(number)
    assert lines.pop() == "[DONE]"
    for chunk in map(json.loads, lines):
        assert "error" not in chunk, chunk
        said["usage"] += [] if chunk["usage"] is None else [chunk["usage"]["completion_tokens"]]
        for choice in chunk["choices"]:
            said[str(choice["index"])] += choice.get("token_ids") or []
            said["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return said


async def test_a_killed_replica_is_noticed_by_nobody(site: Site) -> None:
    numbers, events = range(NUM_STREAMS), list[int]()
    async with httpx2.AsyncClient(timeout=120) as client:
        other = site.replicas[1].url
        undisturbed = await asyncio.gather(*(stream(client, other, number, []) for number in numbers))
        streams = [asyncio.create_task(stream(client, site.front.url, number, events)) for number in numbers]
        while len(set(events)) < NUM_STREAMS:
            await asyncio.sleep(0.01)
        site.replicas[0].kill()
        assert await asyncio.gather(*streams) == undisturbed
        body = {"model": "tiny", "prompt": "a", "max_tokens": 3}
        assert (await client.post(f"{site.front.url}/v1/completions", json=body)).status_code == 200
    assert all(len(said["0"]) == len(said["1"]) == TOKENS for said in undisturbed)
    assert "a stream goes on" in site.front.log.read_text()
