"""The files for Ray name settings, deployments and versions that there are, and say the same."""

import ast
import re
import tomllib
from typing import Any

import pytest
import yaml

import service
from service.config_sources import load_config
from tests.architecture.rules import ROOT

FOLDER = ROOT / "deploy" / "ray"
KUBERAY: dict[str, Any] = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
SERVED: dict[str, dict[str, Any]] = {
    "serve": yaml.safe_load((FOLDER / "serve.yaml").read_text()),
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
    images = set(re.findall(r"adaptree:[\w.-]+", (FOLDER / "kuberay.yaml").read_text()))
    assert images == {f"adaptree:{service.__version__}-ray"}


def test_nodes_hold_the_replicas_of_the_least_and_end_after_they_have_drained() -> None:
    (application,) = SERVED["kuberay"]["applications"]
    replica = next(one for one in application["deployments"] if one["name"] == "Replica")
    (workers,) = KUBERAY["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    cores = workers["minReplicas"] * int(pod["containers"][0]["resources"]["limits"]["cpu"])
    assert cores >= replica["autoscaling_config"]["min_replicas"] * replica["ray_actor_options"]["num_cpus"]
    assert pod["terminationGracePeriodSeconds"] > application["args"]["drain_seconds"]
