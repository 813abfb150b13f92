"""Two server processes behind an ingress process, one of which is killed: every stream is the undisturbed one."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from benchmarks.fleets import Fleet, Processes, processes
from benchmarks.replicas import Load, figures_of, rows_of
from benchmarks.streams import Received, ask, questions
from service.bench.servers import Servers
from service.config import ServiceConfig
from tests.service.bench.parts import save_two_layers
from tests.tiny_models import served_by

NUM_STREAMS = 8
TOKENS = 120


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("ingress")
    model = save_two_layers(folder / "model")
    settings = served_by(model, drafter="memory", max_model_len=512, state_dir=str(folder / "state"))
    with processes(Servers(ServiceConfig.model_validate(settings), folder), 2) as fleet:
        yield fleet


def asked(count: int) -> list[dict[str, Any]]:
    """So many streams, of two answers each."""
    texts = (f"{number} is the other" for number in range(count))
    return [
        {**body, "n": 2} for body in questions("tiny", [[{"role": "user", "content": text}] for text in texts], TOKENS)
    ]


async def response(client: httpx.AsyncClient, url: str, number: int, heard: Callable[[], None]) -> list[str]:
    """The text of a response as its events tell it, and that of its last event; all events are numbered."""
    body = {
        "model": "tiny",
        "input": f"{number} is it",
        "stream": True,
        "max_output_tokens": TOKENS,
        "ignore_eos": True,
    }
    deltas, events = "", list[dict[str, Any]]()
    async with client.stream("POST", f"{url}/v1/responses", json={**body, "seed": number}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                heard()
                events.append(json.loads(line.removeprefix("data: ")))
                deltas += events[-1].get("delta", "")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.incomplete"
    return [deltas, *(part["text"] for item in events[-1]["response"]["output"] for part in item["content"])]


async def streams_while_one_is_killed(
    fleet: Fleet, count: int
) -> tuple[list[Received | list[str]], list[Received | list[str]]]:
    """Undisturbed, and while a replica is killed when half of them have begun; one in three is a response."""
    begun: set[int] = set()
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:

        def streams() -> list[asyncio.Task[Received | list[str]]]:
            return [asyncio.create_task(stream(number, body)) for number, body in enumerate(asked(count))]

        async def stream(number: int, body: dict[str, Any]) -> Received | list[str]:
            heard = partial(begun.add, number)
            if number % 3 == 2:
                return await response(client, fleet.url, number, heard)
            return await ask(client, fleet.url, body, heard=heard)

        undisturbed = await asyncio.gather(*streams())
        begun.clear()
        disturbed = streams()
        while len(begun) < count // 2:  # the first ones may be over where all have begun
            await asyncio.sleep(0.01)
        await asyncio.to_thread(fleet.kill_one, random.Random(0))
        return undisturbed, await asyncio.gather(*disturbed)


async def test_a_killed_replica_is_noticed_by_no_one(fleet: Processes) -> None:
    undisturbed, disturbed = await streams_while_one_is_killed(fleet, NUM_STREAMS)
    assert disturbed == undisturbed
    completions = [spoken for spoken in disturbed if isinstance(spoken, Received)]
    assert all(spoken.is_complete and spoken.failure is None for spoken in completions)
    assert sum(len(spoken.seconds_to_go_on) for spoken in completions) > 0
    for deltas, whole in (spoken for spoken in disturbed if not isinstance(spoken, Received)):
        assert deltas == whole != ""
    assert "another replica resumed a stream" in fleet.front.log.read_text()


async def test_a_load_is_distinguished_by_what_became_of_it(fleet: Processes) -> None:
    async with httpx.AsyncClient(timeout=300) as client:
        load = Load(fleet, client, asked(4), random.Random(0))
        await load.run(seconds=2.0, rate=6.0, kill_seconds=0.5)
    figures = figures_of(load.streams, load.seconds)
    assert (figures["failed"], figures["mismatched_tokens"]) == (0, 0)
    assert figures["streams"] == figures["complete"] == figures["equal"] > 3
    assert len(load.kills) >= 1
    (row,) = rows_of(load.streams, load.kills, load.seconds)
    assert (row["streams"], row["kills"]) == (figures["streams"], len(load.kills))
    assert 0 < figures["first_p50_seconds"] <= figures["latency_p50_seconds"] <= figures["latency_p99_seconds"]
    assert 0 < figures["longest_gap_seconds"] < max(one.latency_seconds for one in load.streams)
