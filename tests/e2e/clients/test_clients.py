"""Clients that applications use, each in an environment of its own, for their requirements clash, against a running
server."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environments import node_environment, python_environment, run
from tests.processes import Process, begin, write_settings
from tests.tiny_models import served_by

HERE = Path(__file__).parent


def serving(root: Path, **more: object) -> Process:
    settings = served_by(Path("dummy(tiny)"), drafter="lookup", budget_policy="fixed", max_budget=12)
    sizes = {"state_dir": str(root / "state"), "max_model_len": 2048, "kv_cache": "200MiB", **more}
    words = write_settings(root / "config.yaml", {**settings, **sizes})
    return begin(["serve"], root / "config.yaml", root / "log", program=words)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    running = serving(tmp_path_factory.mktemp("clients"))
    yield running
    running.end()


LARGE = [pytest.param(client, marks=pytest.mark.slow) for client in ("langchain", "litellm")]  # to install


@pytest.mark.parametrize("client", ["openai", "pydantic_ai", "instructor", *LARGE])
def test_python_clients(client: str, server: Process) -> None:
    folder = python_environment(HERE / f"{client}.txt")
    said = run(["bin/python", str(HERE / f"check_{client}.py"), f"{server.url}/v1"], folder)
    assert said.count("ok ") >= 3


def test_the_ai_sdk_of_npm(server: Process) -> None:
    folder = node_environment(HERE / "package.json")
    shutil.copy(HERE / "check_ai_sdk.mjs", folder)  # modules are looked for beside a script
    said = run(["node", "check_ai_sdk.mjs", f"{server.url}/v1"], folder)
    assert said.count("ok ") == 6
