"""The wheel as people install it: built by `make wheel`, into an environment of its own, on a machine without g++."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import httpx2 as httpx
import pytest

from service.bench.servers import Process
from tests.environments import run

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(["make", "wheel", f"DIST={folder}"], ROOT)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the wheel and what it asks for, without the embedded model."""
    folder = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "."], folder)
    run(["bin/pip", "install", "-q", "--no-compile", "torch==2.13.0"], folder)
    run(["bin/pip", "install", "-q", "--no-compile", str(wheel)], folder)
    return folder


@pytest.fixture(scope="module")
def ready(environment: Path) -> Path:
    """The environment with the embedded model, by the command that a start without it names."""
    refused = subprocess.run(["bin/adaptree", "serve"], cwd=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    command = re.search(r"`pip (install [^`]*)`", refused.stderr)
    assert command, refused.stderr
    run(["bin/pip", *command[1].split()], environment)
    return environment


def test_one_wheel_is_for_every_python_and_holds_every_build(wheel: Path) -> None:
    assert re.fullmatch(r"adaptree-[\d.]+-py3-none-manylinux_2_(1\d|2[0-8])_x86_64\.whl", wheel.name)
    names = ZipFile(wheel).namelist()
    builds = {name for name in names if name.endswith(".so")}
    assert builds == {f"kernels/cpu/{build}.so" for build in ("avx2", "avxvnni", "avx512", "avx512bf16")}
    assert not [name for name in names if name.endswith((".cpp", ".h"))]
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]


def test_nothing_is_missing_from_the_environment(ready: Path) -> None:
    assert run(["bin/pip", "check"], ready).strip() == "No broken requirements found."


@pytest.mark.parametrize("build", [None, "avx2"])
def test_the_first_answer_of_a_machine_without_a_compiler(ready: Path, build: str | None, tmp_path: Path) -> None:
    chosen: Mapping[str, str] = {} if build is None else {"CPU_KERNELS": build}
    environ = {"HOME": str(tmp_path), "PATH": str(ready / "bin"), "ADAPTREE_STATE_DIR": str(tmp_path), **chosen}
    server = Process.begin("adaptree", [str(ready / "bin/adaptree"), "serve", "--port", "0"], tmp_path / "log", environ)
    try:
        asked = {"model": "smollm2-135m", "max_tokens": 8, "messages": [{"role": "user", "content": "Name a river."}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 8
        libraries = re.findall(r"\S*/lib[gi]?omp\S*", Path(f"/proc/{server.running.pid}/maps").read_text())
        assert len(set(libraries)) == 1, "of two OpenMP runtimes each has as many threads as there should be"
        assert f"kernels: {build or 'avx'}" in server.log.read_text()
    finally:
        server.end()
