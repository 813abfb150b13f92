"""The shipped example configurations start a server, or refuse for a stated reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from service.config_sources import load_config
from tests.architecture.rules import ROOT
from tests.processes import begin
from tests.service.bench.parts import save_two_layers

FOLDER = ROOT / "deploy" / "config"
SHIPPED = sorted(FOLDER.glob("*.yaml"))


def test_there_are_three() -> None:
    assert [file.name for file in SHIPPED] == ["cpu.yaml", "example.yaml", "gpu.yaml"]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_each_is_possible(file: Path) -> None:
    loaded = load_config({"config": file}, {})
    named = yaml.safe_load(file.read_text()) or {}
    from_file = {name for name, origin in loaded.origin.items() if origin.startswith("file")}
    assert {name.split(".")[0] for name in from_file} == set(named)


def test_the_cpu_example_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model that is loaded and measured at once."""
    model = save_two_layers(tmp_path / "model")
    small = {"MODEL": model, "LOAD_DTYPE": "float32", "MAX_MODEL_LEN": 128, "THREADS": 1, "KV_CACHE": "10MiB"}
    serve_and_ask(tmp_path, monkeypatch, small)


@pytest.mark.slow
def test_the_cpu_example_serves_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_and_ask(tmp_path, monkeypatch, {})


def serve_and_ask(folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]) -> None:
    for name, value in {**settings, "PORT": 0, "STATE_DIR": folder / "state"}.items():
        monkeypatch.setenv(f"ADAPTREE_{name}", str(value))
    server = begin(["serve"], FOLDER / "cpu.yaml", folder / "log")
    try:
        model = server.ask("GET", "/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "that the other", "max_tokens": 4, "ignore_eos": True}
        answer = server.ask("POST", "/v1/completions", json=body).raise_for_status().json()
    finally:
        server.end()
    assert answer["usage"]["completion_tokens"] == 4


def test_the_gpu_example_refuses_where_there_is_no_gpu(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("adaptree")), "serve", "--config", str(FOLDER / "gpu.yaml")]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ADAPTREE_STATE_DIR": str(tmp_path), "ADAPTREE_PORT": "0"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    refusal = done.stderr.splitlines()[-1]
    assert refusal == ("adaptree cannot start: device 'cuda': this machine has 0 CUDA devices; set device to cpu")
