"""The image built, and the composition run: ordinary user, root that is only read, health, panels, replicas, stop.

As root, since debootstrap needs it. Redis and Prometheus are Debian's, with the composition's own configuration.
"""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import httpx2 as httpx
import pytest
import yaml

from benchmarks.fleets import free_port
from service.bench.servers import came_true
from tests.architecture.rules import ROOT
from tests.deploy.containers import Containers, begun, build
from tests.deploy.dashboards import FILES, questions
from tests.deploy.watching import Prometheus

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap needs root")]

SERVICES = ("adaptree", "redis", "prometheus")
PATIENCE_SECONDS = 300  # for an answer
CLIENTS = 2
MOST_BYTES = 2 * 10**9  # far less than with CUDA
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
_KINDS: tuple[dict[str, Any], ...] = (
    {"content": "What is the capital of France?"},
    {"content": "Write two sentences about the sea.", "stream": True},
    {"content": "How is the weather?", "tools": [_TOOL], "tool_choice": "required"},
    {"content": "Name a colour as JSON.", "response_format": {"type": "json_object"}},
    {"content": "What is the capital of France?", "temperature": 0},
    {"content": "Do not keep this.", "store": False},
    {"content": "This is refused.", "temperature": 99},
)


@dataclass(frozen=True)
class Stack:
    """The composition, running."""

    containers: Containers
    url: str
    prometheus: Prometheus

    def in_service(self, *command: str) -> str:
        """What a command prints in the service's container."""
        return self.containers.podman("exec", self.containers.name_of("adaptree"), *command)

    def state(self, field: str) -> str:
        """A field of the service's container."""
        return self.containers.podman("inspect", "--format", f"{{{{{field}}}}}", self.containers.name_of("adaptree"))

    def chat(self, content: str, **fields: Any) -> httpx.Response:
        body = {"model": "smollm2-135m", "max_tokens": 32, "messages": [{"role": "user", "content": content}], **fields}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with begun() as containers:
        yield from composed(containers)


def composed(containers: Containers) -> Iterator[Stack]:
    """The service ready, beside Redis and Prometheus."""
    text = (ROOT / "docker-compose.yml").read_text()
    build(containers, {name: one["image"] for name, one in yaml.safe_load(text)["services"].items()})
    ports = {inside: free_port() for inside in (8000, 9090)}
    for inside, port in ports.items():
        text = text.replace(f"127.0.0.1:{inside}:{inside}", f"127.0.0.1:{port}:{inside}")
    (containers.folder / "docker-compose.yml").write_text(text.replace("./deploy", str(ROOT / "deploy")))
    containers.compose("up", "-d", "--no-build", *SERVICES)
    running = Stack(containers, f"http://127.0.0.1:{ports[8000]}", Prometheus(f"http://127.0.0.1:{ports[9090]}"))
    assert came_true(lambda: running.prometheus.numbers("adaptree_ready == 1", seconds=5))
    yield running


def test_it_answers_as_an_ordinary_user_on_a_root_that_is_only_read(stack: Stack) -> None:
    assert stack.chat("Name a river.").json()["usage"]["completion_tokens"]
    assert stack.in_service("id", "--user") == "10001"
    assert (stack.state(".HostConfig.ReadonlyRootfs"), stack.state(".EffectiveCaps")) == ("true", "[]")


def test_it_writes_in_its_volume_alone(stack: Stack) -> None:
    changed = stack.containers.podman("diff", stack.containers.name_of("adaptree")).splitlines()
    assert {line.split()[1] for line in changed} <= {"/etc", "/etc/adaptree", "/etc/adaptree/config.yaml"}
    assert stack.in_service("find", "/var/lib/adaptree/costs", "-name", "*.json")


def test_its_health_check_is_in_the_image_and_passes(stack: Stack) -> None:
    stack.containers.podman("healthcheck", "run", stack.containers.name_of("adaptree"))


def test_the_image_has_no_gigabytes_of_cuda(stack: Stack) -> None:
    sizes = stack.containers.podman("images", "--format", "{{.Repository}} {{.Size}}").splitlines()
    (size,) = [line.partition(" ")[2] for line in sizes if line.startswith("localhost/adaptree ")]
    number, unit = size.split()
    assert float(number) * {"MB": 10**6, "GB": 10**9}[unit] < MOST_BYTES


def test_the_replicas_have_a_store(stack: Stack) -> None:
    assert came_true(lambda: stack.prometheus.numbers('adaptree_replica_role{role="leading"} == 1', seconds=5))
    assert stack.prometheus.numbers("adaptree_replica_connected == 1", seconds=5)


def test_every_panel_shows_something_after_some_traffic(stack: Stack) -> None:
    began = time.time()
    clients = [threading.Thread(target=ask_everything, args=(stack, first)) for first in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert came_true(lambda: stack.prometheus.numbers("adaptree_adaptation_updates_total > 0", seconds=5))
    time.sleep(15)  # of Prometheus: three scrapes
    asked = {where: expression for file in FILES for where, expression in questions(file, "20s")}
    panels = {where: expression for where, expression in asked.items() if "annotation" not in where}
    seconds = time.time() - began
    empty = {where for where, expression in panels.items() if not stack.prometheus.numbers(expression, seconds=seconds)}
    assert len(panels) > 80
    assert empty == set()


def ask_everything(stack: Stack, first: int) -> None:
    for number, kind in enumerate(islice(cycle(_KINDS), first, 5 * len(_KINDS))):
        answer = stack.chat(**kind, user=str(number % 4))
        assert answer.status_code == (400 if kind.get("temperature") == 99 else 200), answer.text


def test_a_stop_finishes_what_is_being_streamed(stack: Stack) -> None:
    """Killed after stop_grace_period it would not end with 0. The last test: it ends the service."""
    stopping = threading.Thread(target=stack.containers.compose, args=("stop", "adaptree"))
    body = {"model": "smollm2-135m", "prompt": "Once", "max_tokens": 128, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        stopping.start()
        rest = [line for line in lines if line]
    stopping.join()
    assert rest[-1] == "data: [DONE]"
    assert stack.state(".State.ExitCode") == "0"
