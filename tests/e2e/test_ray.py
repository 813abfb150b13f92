"""Replicas on a real Ray: one of them is killed under streams, and all are replaced under load."""

import asyncio
import json
import os
import site
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.deploy.programs import free_port
from tests.e2e.test_ingress import stream
from tests.environments import python_environment
from tests.service.bench.parts import save_two_layers
from tests.tiny_models import served_by

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

HERE = Path(__file__).parent
NUM_STREAMS = 20
NUM_REPLICAS = 2
CLIENTS = 4
NOTHING_ELSEWHERE = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}  # no report, no file at home


@dataclass
class RaySite:
    process: subprocess.Popen[str]
    settings: dict[str, Any]
    url: str = ""

    def said(self, word: str) -> str:
        """The line that begins so; Ray says things in between. Nothing if it ends before."""
        assert self.process.stdout is not None
        return next((line.strip() for line in self.process.stdout if line.startswith(word)), "")

    def update(self) -> None:
        """Other settings, under which answers are the same."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**self.settings, "max_budget": 5}) + "\n")
        self.process.stdin.flush()
        assert self.said("updated")

    def replicas(self) -> set[int]:
        """Their process ids."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return {one.pid for one in found if "ServeReplica:default:Replica" in " ".join(one.cmdline())}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RaySite]:
    folder = tmp_path_factory.mktemp("ray")
    model = save_two_layers(folder / "model")
    settings = served_by(model, drafter="lookup", max_model_len=512, state_dir=str(folder / "state"))
    python = python_environment(HERE / "ray.txt") / "bin" / "python"
    # Ray alone comes from the environment; everything else is what the other tests run with.
    paths = os.pathsep.join([str(HERE.parents[1]), *site.getsitepackages()])
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **NOTHING_ELSEWHERE}
    command = [str(python), str(HERE / "ray_site.py"), str(free_port()), json.dumps(settings)]
    pipe, log = subprocess.PIPE, folder / "log"
    with (
        log.open("w") as stream,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stream, text=True, env=environ) as process,
    ):
        made = RaySite(process, settings)
        try:
            made.url = made.said("ready: ").removeprefix("ready: ").removesuffix("/v1")
            assert made.url, log.read_text()[-4000:]
            yield made
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(120) == 0
        finally:
            process.kill()


async def test_a_killed_replica_is_noticed_by_nobody(running: RaySite) -> None:
    numbers, events = range(NUM_STREAMS), list[int]()
    async with httpx2.AsyncClient(timeout=300, limits=httpx2.Limits(max_connections=None)) as client:
        undisturbed = await asyncio.gather(*(stream(client, running.url, number, []) for number in numbers))
        streams = [asyncio.create_task(stream(client, running.url, number, events)) for number in numbers]
        while len(set(events)) < NUM_STREAMS:
            await asyncio.sleep(0.01)
        psutil.Process(min(running.replicas())).kill()
        assert await asyncio.gather(*streams) == undisturbed


async def test_all_are_replaced_and_no_request_is_lost(running: RaySite) -> None:
    while len(running.replicas()) < NUM_REPLICAS:  # the one that was killed
        await asyncio.sleep(0.5)
    before, done = running.replicas(), False

    async with httpx2.AsyncClient(timeout=300, limits=httpx2.Limits(max_connections=None)) as client:
        undisturbed = [await stream(client, running.url, number, []) for number in range(CLIENTS)]

        async def ask(number: int) -> int:
            count = 0
            while not done:
                assert await stream(client, running.url, number, []) == undisturbed[number]
                body = {"model": "tiny", "prompt": "a", "max_tokens": 3}
                answer = await client.post(f"{running.url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                count += 2
            return count

        clients = [asyncio.create_task(ask(number)) for number in range(CLIENTS)]
        await asyncio.to_thread(running.update)
        while running.replicas() & before:
            await asyncio.sleep(0.5)
        done = True
        print(f"{sum(await asyncio.gather(*clients))} requests while all replicas were replaced")
