"""The loaded models that the benchmarks' tests share, and the command line."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import app
from benchmarks.shift_play import Learning
from kernels.cpu.library import use_threads
from tests.service.bench.conftest import assembly, prompt_file, quiet, trained_assembly
from tests.service.bench.parts import run_command, save_two_layers, written_prompts
from tests.tuned import settled

__all__ = ["assembly", "prompt_file", "quiet", "trained_assembly"]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(
        pytest.mark.slow(
            "experiments of this repository: no part of what is installed", covers="benchmarks tests/benchmarks"
        )
    )


@pytest.fixture
def run(quiet: None) -> Callable[..., tuple[int, str]]:
    """`python -m benchmarks ...`, as `run_command`."""
    return partial(run_command, program=app)


@pytest.fixture
def in_no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of so small a model are over before anything is learnt: here they wait for it."""
    hold = Learning.hold

    def settled_first(self: Learning) -> None:
        assert settled(self._adaptive.worker)
        hold(self)

    monkeypatch.setattr(Learning, "hold", settled_first)


Report = dict[str, Any]


@pytest.fixture
def run_tiny(run: Callable[..., tuple[int, str]], tmp_path: Path) -> Iterator[Callable[..., tuple[Report, str]]]:
    """An experiment on the target of two layers and a few prompts, with these words beside: its report and output."""

    def run_tiny(experiment: str, *words: object) -> tuple[Report, str]:
        folder = save_two_layers(tmp_path / "model")
        prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
        prompts.write_text("\n".join(written_prompts()))
        code, output = run(
            *(experiment, "--prompts", prompts, "--out", out, "--model", folder, "--load-dtype", "float32"),
            *("--device", "cpu", "--threads", 1, "--max-model-len", 256, "--state-dir", folder / "state"),
            *("--drafter", "memory", *words),
        )
        assert code == 0, output
        return json.loads(out.read_text()), output

    yield run_tiny
    use_threads(1)
