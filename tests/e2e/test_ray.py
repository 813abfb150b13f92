"""Replicas on a real Ray: one of them is killed under streams, and all are replaced under load."""

import asyncio
import os
import site
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.fleets import OnRay, on_ray
from benchmarks.streams import Received, ask
from service.bench.servers import Servers
from service.config import ServiceConfig
from tests.e2e.test_ingress import asked, streams_while_one_is_killed
from tests.environments import python_environment
from tests.service.bench.parts import save_two_layers
from tests.tiny_models import served_by

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NUM_STREAMS = 20
CLIENTS = 4


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    """`param`: processes of each replica that share its model."""
    folder = tmp_path_factory.mktemp("ray")
    model, state = save_two_layers(folder / "model", hidden_size=128), str(folder / "state")
    settings = served_by(model, drafter="memory", max_model_len=512, state_dir=state, tensor_parallel=request.param)
    python = python_environment(HERE / "ray.txt") / "bin" / "python"
    # Ray alone comes from the environment; everything else is what the other tests run with.
    paths = os.pathsep.join([str(HERE.parents[1]), *site.getsitepackages()])
    servers = Servers(ServiceConfig.model_validate(settings), folder)
    with on_ray(servers, 2, str(python), PYTHONPATH=paths, OMP_NUM_THREADS="1") as fleet:
        yield fleet


async def test_a_killed_replica_is_noticed_by_no_one(running: OnRay) -> None:
    undisturbed, disturbed = await streams_while_one_is_killed(running, NUM_STREAMS)
    assert disturbed == undisturbed
    assert all(spoken.is_complete and spoken.failure is None for spoken in disturbed if isinstance(spoken, Received))


async def test_all_are_replaced_and_no_request_is_lost(running: OnRay) -> None:
    while len(running.replicas()) < running.count:  # the one that was killed
        await asyncio.sleep(0.5)
    before, done = running.replicas(), False

    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        bodies = asked(CLIENTS)
        undisturbed = [await ask(client, running.url, body) for body in bodies]

        async def again_and_again(number: int) -> int:
            count = 0
            while not done:
                assert await ask(client, running.url, bodies[number]) == undisturbed[number]
                body = {"model": "tiny", "prompt": "a", "max_tokens": 3}
                answer = await client.post(f"{running.url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                count += 2
            return count

        clients = [asyncio.create_task(again_and_again(number)) for number in range(CLIENTS)]
        await asyncio.to_thread(running.update, max_budget=5)
        while running.replicas() & before:
            await asyncio.sleep(0.5)
        done = True
        print(f"{sum(await asyncio.gather(*clients))} requests while all replicas were replaced")
