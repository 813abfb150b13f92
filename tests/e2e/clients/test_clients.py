"""Clients that applications use, each in an environment of its own, for their requirements clash, against a running
server."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Process, begin, write_settings
from tests.tiny_models import served_by

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[2] / "build" / "clients"
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    root = tmp_path_factory.mktemp("clients")
    settings = served_by(Path("dummy(tiny)"), drafter="lookup", budget_policy="fixed", max_budget=12)
    sizes = {"state_dir": str(root / "state"), "max_model_len": 2048, "kv_cache": "200MiB"}
    words = write_settings(root / "config.yaml", {**settings, **sizes})
    running = begin(["serve"], root / "config.yaml", root / "log", program=words)
    yield running
    running.end()


def made(name: str, requirements: Path, *commands: list[str]) -> Path:
    """The folder of an environment, made anew where its requirements are others than those it was made of."""
    folder = ENVIRONMENTS / name
    stamp = folder / "made-of"
    if not stamp.exists() or stamp.read_bytes() != requirements.read_bytes():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(requirements, folder)
        for command in commands:
            run(command, folder)
        stamp.write_bytes(requirements.read_bytes())
    return folder


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=OUTSIDE, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("client", ["openai", "pydantic_ai", "instructor", "langchain", "litellm"])
def test_python_clients(client: str, server: Process) -> None:
    create = [sys.executable, "-m", "venv", "."]
    install = ["bin/pip", "install", "-q", "--disable-pip-version-check", "-r", f"{client}.txt"]
    folder = made(client, HERE / f"{client}.txt", create, install)
    said = run(["bin/python", str(HERE / f"check_{client}.py"), f"{server.url}/v1"], folder)
    assert said.count("ok ") >= 3


def test_the_ai_sdk_of_npm(server: Process) -> None:
    install = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
    folder = made("ai_sdk", HERE / "package.json", install)
    shutil.copy(HERE / "check_ai_sdk.mjs", folder)  # modules are looked for beside a script
    said = run(["node", "check_ai_sdk.mjs", f"{server.url}/v1"], folder)
    assert said.count("ok ") == 6
