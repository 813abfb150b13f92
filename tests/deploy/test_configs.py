"""The shipped example configurations start a server, or refuse for a stated reason."""

import ast
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

import service
from drafters.network.model import SpecBlock
from service.assembly import _learning, assemble
from service.config import GIB
from service.config_sources import load_config
from service.engine import memory_planner
from service.engine.engine import EngineLimits
from service.engine.initial_drafter import drafter_config
from service.engine.kv_pool import KVShape, LayerKV
from service.engine.memory_planner import MemoryPlan, needs_of, room_for
from service.errors import StartupError
from tests.architecture.rules import ROOT
from tests.processes import begin
from tests.service.bench.parts import save_two_layers

FOLDER = ROOT / "deploy" / "config"
QWEN3_8B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
)
"""As published."""
SHIPPED = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_each_is_possible(file: Path) -> None:
    loaded = load_config({"config": file}, {})
    named = yaml.safe_load(file.read_text()) or {}
    from_file = {name for name, origin in loaded.origin.items() if origin.startswith("file")}
    assert {name.split(".")[0] for name in from_file} == set(named)


@pytest.mark.parametrize(
    ("others", "gigabytes"),
    [
        ({}, int(re.findall(r"at least (\d+) GB", (FOLDER / "gpu.yaml").read_text())[0])),
        ({"ADAPTATION__TRAIN_DEVICE": "cpu"}, 48),
        ({"ADAPTATION__ENABLED": "false", "MAX_SEQUENCES": "8", "MAX_MODEL_LEN": "8192"}, 24),
    ],
)
def test_the_gpu_example_fits_where_it_says(
    others: dict[str, str], gigabytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the plan of the start, for the shapes of its model; what forwards take is no more than guessed, generously."""
    assert f" {gigabytes} GB" in (FOLDER / "gpu.yaml").read_text()
    monkeypatch.setattr(memory_planner, "_measured", lambda target, rows: GIB)
    environ = {f"ADAPTREE_{name}": value for name, value in others.items()}
    config = load_config({"config": FOLDER / "gpu.yaml"}, environ).config
    with torch.device("meta"):
        model = Qwen3ForCausalLM(QWEN3_8B)
        shape = drafter_config(model)
        drafter = SpecBlock(shape)
    pairs = KVShape((LayerKV(kv_heads=8, dim=128),) * 36, dtype=torch.bfloat16)
    heads = SimpleNamespace(attention=LayerKV(kv_heads=8, dim=128))
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    learning = _learning(config, cast(Any, SimpleNamespace(initial_drafter=drafter, model=on_gpu)))
    network = (
        cast(Any, SimpleNamespace(config=shape, traits=shape.traits, dtype=torch.bfloat16, shape=heads))
        if learning
        else None
    )
    limits = EngineLimits(
        max_model_len=config.max_model_len or QWEN3_8B.max_position_embeddings,
        max_sequences=config.max_sequences,
        prefill_chunk=config.prefill_chunk,
        max_budget=config.max_budget,
    )
    target = cast(Any, SimpleNamespace(vocab_size=QWEN3_8B.vocab_size, model=SimpleNamespace(dtype=torch.bfloat16)))
    begun = sum(value.numel() for value in drafter.parameters()) if learning else 0
    weights = 2 * (model.num_parameters() + 2 * begun)  # in bf16; the drafter once more as it serves
    needs = needs_of(target, limits, network, learning, captures=True)
    pool = config.kv_cache_bytes("cuda", MemoryPlan(gigabytes * 10**9 - weights, needs).left_bytes)
    beside = memory_planner.entry_bytes(network)
    assert room_for(pairs, pool, limits, bytes_beside=beside)


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


def test_the_gpu_example_refuses_where_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = load_config({"config": FOLDER / "gpu.yaml", "state_dir": str(tmp_path)}, {}).config
    with pytest.raises(StartupError, match="this machine has 0 CUDA devices; set device to cpu"):
        assemble(config)


# The files for Ray name settings, deployments and versions that there are, and say the same.

RAY = ROOT / "deploy" / "ray"
KUBERAY: dict[str, Any] = yaml.safe_load((RAY / "kuberay.yaml").read_text())
SERVED: dict[str, dict[str, Any]] = {
    "serve": yaml.safe_load((RAY / "serve.yaml").read_text()),
    "kuberay": yaml.safe_load(KUBERAY["spec"]["serveConfigV2"]),
}
SOURCE = ROOT / "service" / "ray_serve.py"


@pytest.mark.parametrize("name", SERVED)
def test_an_application_is_what_there_is(name: str) -> None:
    (application,) = SERVED[name]["applications"]
    module, _, function = application["import_path"].partition(":")
    tree = ast.parse(SOURCE.read_text())
    assert module == "service.ray_serve"
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    named = set(re.findall(r'name="(\w+)"', SOURCE.read_text()))
    assert {one["name"] for one in application["deployments"]} == named
    config = load_config(application["args"], {}).config
    replica = next(one for one in application["deployments"] if one["name"] == "Replica")
    assert replica["ray_actor_options"]["num_cpus"] == config.num_threads
    assert replica["autoscaling_config"]["target_ongoing_requests"] <= config.max_sequences


def test_one_machine_and_kubernetes_serve_the_same() -> None:
    assert SERVED["serve"]["applications"] == SERVED["kuberay"]["applications"]
    assert SERVED["serve"]["http_options"]["host"] == "127.0.0.1"


def test_one_version_everywhere() -> None:
    version = KUBERAY["spec"]["rayClusterConfig"]["rayVersion"]
    (wanted,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["ray"]
    assert f">={version.rpartition('.')[0]}," in wanted
    assert f"ray=={version}\n" in (ROOT / "constraints.txt").read_text()
    assert (ROOT / "tests" / "e2e" / "ray.txt").read_text() == f"ray[serve]=={version}\n"
    images = set(re.findall(r"adaptree:[\w.-]+", (RAY / "kuberay.yaml").read_text()))
    assert images == {f"adaptree:{service.__version__}-ray"}


def test_nodes_hold_the_replicas_of_the_least_and_end_after_they_have_drained() -> None:
    (application,) = SERVED["kuberay"]["applications"]
    replica = next(one for one in application["deployments"] if one["name"] == "Replica")
    (workers,) = KUBERAY["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    cores = workers["minReplicas"] * int(pod["containers"][0]["resources"]["limits"]["cpu"])
    assert cores >= replica["autoscaling_config"]["min_replicas"] * replica["ray_actor_options"]["num_cpus"]
    assert pod["terminationGracePeriodSeconds"] > application["args"]["drain_seconds"]
