"""Imports only go down: HTTP, runtime, engine beside adaptation, drafters, kernels."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.architecture.rules import (
    BENCHMARKS,
    PACKAGES,
    complaints,
    imports_of,
    imports_upwards,
    module_name,
    modules,
)

LEAVES = (
    "service.api_keys",
    "adaptation.config",
    "service.__version__",
    "service.errors",
    "service.door",
    "service.config",
    "service.config_sources",
    "service.observability.guard",
    "service.observability.live",
    "service.logging",
    "service.learning.auto",
    "service.sampling_params",
    "service.observability.learning_tables",
    "service.observability.metrics",
    "service.observability.metric_tables",
    "service.text.answers",
    "service.text.chat_template",
    "service.text.grammar_pool",
    "service.text.grammars",
    "service.text.json_schemas",
    "service.text.schema_keywords",
    "service.text.special_tokens",
    "service.text.tokenizer",
)
RECORDS = (
    "service.engine.requests",
    "service.engine.stats",
    "adaptation.config",
    "adaptation.records",
    "drafters.files",
    "drafters.memory_counts",
)

ALLOWED = {
    "kernels": ("kernels",),
    "drafters": ("drafters", "kernels"),
    "adaptation": ("adaptation", "drafters", "kernels"),
    "service": LEAVES + RECORDS,  # the leaves themselves
    "service.engine": ("service.engine", *LEAVES, "drafters", "kernels"),
    "service.api": ("service.api", "service.runtime", *LEAVES, *RECORDS),
    # The assembly, the server process, the benchmarks and the command line build and start everything.
    "service.runtime": ("service.runtime", *LEAVES, *RECORDS),
    "service.drafter": ("service.drafter", "service.engine", *LEAVES, "drafters", "kernels"),
    "service.follow": ("service.follow", "service.engine", *LEAVES, "kernels"),
    "service.assembly": (
        "service.assembly",
        "service.follow",
        "service.drafter",
        "service.engine",
        *LEAVES,
        "drafters",
        "kernels",
    ),
    "service.ingress": ("service.ingress", "service.api", *LEAVES),
    "service.ray_serve": PACKAGES,
    "service.learning": PACKAGES,
    "service.past": PACKAGES,
    "service.serve": PACKAGES,
    "service.doctor": PACKAGES,
    "service.cli": PACKAGES,
    "service.__main__": ("service.cli",),
    "service.bench": PACKAGES,
    "service.conditions": PACKAGES,
}

# Torch costs seconds to import and has no business on the event loop.
WITHOUT_TORCH = (
    *modules("service/api", "service/ingress"),
    *(path for path in modules(*PACKAGES) if module_name(path) in {*LEAVES, *RECORDS} - {"service.text.tokenizer"}),
)


def test_imports_go_down() -> None:
    upwards = {
        module_name(path): imports_upwards(path.read_text(), module_name(path), ALLOWED) for path in modules(*PACKAGES)
    }
    assert {name: found for name, found in upwards.items() if found} == {}


@pytest.mark.parametrize(
    ("paths", "packages"),
    [
        (WITHOUT_TORCH, ["torch"]),
        # A process that trains needs numbers of a target, and transformers' models cost 8 seconds to import.
        (modules("adaptation", "drafters", "kernels"), ["transformers"]),
        (modules(*PACKAGES), ["deploy", BENCHMARKS, "tests"]),
        (modules(BENCHMARKS), ["tests"]),
    ],
    ids=["the HTTP side", "training", "what is installed", "benchmarks"],
)
def test_these_modules_do_without(paths: Sequence[Path], packages: list[str]) -> None:
    assert paths
    assert complaints(paths, lambda source: imports_of(source, packages)) == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kernels.ops", "import drafters.tree"),
        ("drafters.memory.index", "def late():\n    from service.errors import StartupError"),
        ("drafters.tree", "from adaptation import weights"),
        ("service.engine.step", "import adaptation.weights as weights"),
        ("service.engine.step", "from service import runtime"),
        ("adaptation.weights", "from service.engine.requests import SequenceOutput"),
        ("service.api.app", "from service.engine.scheduler import Scheduler"),
        ("service.api.app", "from service import bench"),
        ("service.errors", "from service.api import app"),
        ("service.observability.metrics", "from adaptation.learner import Learner"),
        ("service.api.info", "from adaptation.weights import DrafterWeights"),
        ("service.errors", "import importlib\nimportlib.import_module('drafters.tree')"),
        ("service.engine.step", "from . import requests"),
        ("stray.module", ""),
    ],
)
def test_an_import_upwards_is_seen(module: str, source: str) -> None:
    assert len(imports_upwards(source, module, ALLOWED)) == 1


@pytest.mark.parametrize(
    "source", ["import torch", "import torch.nn as t", "from torch import Tensor", "import torch as x"]
)
def test_an_import_of_torch_is_seen(source: str) -> None:
    assert len(imports_of(source, ["torch"])) == 1


def test_a_similar_name_is_no_import_of_torch() -> None:
    assert imports_of("import torchlike\nfrom mine import torch", ["torch"]) == []
