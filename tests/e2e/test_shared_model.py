"""A model that two real processes share: the answers and the fingerprint of one, and what becomes of streams where a
process is killed, stopped or cut off."""

import ctypes
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.fleets import Processes, processes
from benchmarks.streams import Received
from kernels.cpu import library
from service.bench.servers import PATIENCE_SECONDS, Process, Servers
from service.config import ServiceConfig
from tests.e2e.test_ingress import streams_while_one_is_killed
from tests.service.bench.parts import save_two_layers
from tests.tiny_models import served_by

pytestmark = [
    pytest.mark.skipif(library.variant() is None, reason="no kernels are compiled"),
    pytest.mark.slow("each server takes ten seconds to start", covers="service/follow.py service/engine/peers.py"),
]
BODY = {"model": "tiny", "prompt": "one is the other", "max_tokens": 60, "temperature": 0.8, "seed": 4}
LONG = {**BODY, "max_tokens": 400, "ignore_eos": True, "stream": True}
STOPPED_SECONDS = 30 + 30  # the leader's patience, and the end of the server, 10 s on busy cores
KILLS = 20
PIDFD_GETFD = 438  # number of this system call on x86 and ARM; Python has no function for it


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Servers:
    folder = tmp_path_factory.mktemp("shared")
    model = save_two_layers(folder / "model", hidden_size=128)
    settings = served_by(model, drafter="memory", max_model_len=512, state_dir=str(folder / "state"))
    return Servers(ServiceConfig.model_validate(settings), folder)


def follower_of(server: Process) -> psutil.Process:
    (found,) = (one for one in psutil.Process(server.running.pid).children() if "follow" in one.cmdline())
    return found


def answer_of(server: Process) -> tuple[str, str]:
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).json()
    return answer["choices"][0]["text"], answer["system_fingerprint"]


def streamed(server: Process, after: Any) -> tuple[str, dict[str, Any]]:
    """The text of a stream during which `after` is called once, and its last event."""
    text, last = "", dict[str, Any]()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=STOPPED_SECONDS) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
                text += "".join(choice["text"] for choice in last.get("choices", ()))
                if after is not None and len(text) > 20:
                    after, _ = None, after()
    return text, last


def test_a_server_ends_where_a_process_that_shares_its_model_is_killed(servers: Servers) -> None:
    server = servers.begin("shared", tensor_parallel=2)
    try:
        whole, end = streamed(server, None)
        assert end["choices"][0]["finish_reason"] == "length"
        text, last = streamed(server, follower_of(server).kill)
        assert last["error"]["code"] == "engine_stopped"
        assert whole.startswith(text)
        assert server.running.wait(20) == 1
    finally:
        server.kill()
    assert "in 2 processes" in server.log.read_text()


def test_two_processes_answer_as_one(servers: Servers) -> None:
    answers = []
    for size in (1, 2):
        server = servers.begin(f"of-{size}", tensor_parallel=size)
        answers.append(answer_of(server))
        server.end()
    assert answers[0] == answers[1]


def test_a_follower_that_cannot_load_ends_the_start(servers: Servers) -> None:
    server = servers.begin("broken", tensor_parallel=4)
    assert server.running.wait(PATIENCE_SECONDS) == 2
    assert "too few heads, columns or experts for 4 devices" in server.log.read_text()


def test_followers_end_with_a_leader_that_is_killed(servers: Servers) -> None:
    server = servers.begin("killed", tensor_parallel=2)
    assert server.ready
    follower = follower_of(server)
    server.kill()
    follower.wait(20)


def cut_off(follower: psutil.Process) -> None:
    """Cut the connection of a follower to its leader, by a copy of its socket; both processes run on."""
    (own,) = (one for one in follower.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED)
    process = os.pidfd_open(follower.pid)
    copied = ctypes.CDLL(None).syscall(PIDFD_GETFD, process, own.fd, 0)
    os.close(process)
    with socket.socket(fileno=copied) as connection:
        connection.shutdown(socket.SHUT_RDWR)


@dataclass
class Shared(Processes):
    """Replicas of two processes each, of which one that follows is lost to its leader."""

    lose: Callable[[psutil.Process], None] = psutil.Process.kill

    def kill_one(self, rng: random.Random) -> None:
        number = rng.randrange(len(self.replicas))
        replica, began = self.replicas[number], time.monotonic()
        self.lose(follower_of(replica))
        assert replica.running.wait(STOPPED_SECONDS) == 1
        print(f"the server ended {time.monotonic() - began:.1f} s after {self.lose.__name__}")
        self.num_killed += 1
        self.replicas[number] = self.servers.begin(f"again-{self.num_killed}", self.ports[number])
        assert self.replicas[number].ready


@pytest.fixture(scope="module")
def fleet(servers: Servers) -> Iterator[Shared]:
    given = {**servers.config.model_dump(mode="json", exclude_unset=True), "tensor_parallel": 2}
    with processes(Servers(ServiceConfig.model_validate(given), servers.folder), 2) as found:
        yield Shared(found.servers, found.ports, found.replicas, found.front)


@pytest.mark.parametrize(
    "lose", [psutil.Process.kill, psutil.Process.suspend, cut_off], ids=["killed", "stopped", "cut off"]
)
async def test_streams_go_on_where_a_process_is(lose: Callable[[psutil.Process], None], fleet: Shared) -> None:
    fleet.lose = lose
    for _ in range(KILLS):
        undisturbed, disturbed = await streams_while_one_is_killed(fleet, 4)
        assert disturbed == undisturbed
        completions = [spoken for spoken in disturbed if isinstance(spoken, Received)]
        assert all(spoken.is_complete and spoken.failure is None for spoken in completions)
