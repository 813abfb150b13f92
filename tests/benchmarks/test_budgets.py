"""Comparing budgets, and counting the experts of a forward."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.budgets import run_steps
from benchmarks.gguf_shapes import Shape, write_shape
from benchmarks.step_costs import experts_of
from kernels.cpu import library
from kernels.rows import ExtendRows
from service.assembly import Assembly, assemble
from service.bench.driver import Run, TimedStep
from service.engine.measuring import Trial
from service.engine.weights import EMBEDDED_NAME, gguf_file
from tests.service.bench.parts import STEP, settings_for
from tests.service.engine.harness import tiny_target
from tests.tiny_models import loaded_tiny


@pytest.mark.usefixtures("quiet")
def test_the_command_compares_budgets(
    run: Callable[..., tuple[int, str]],
    trained_assembly: Assembly,
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costly = assemble(trained_assembly.config.model_copy(update={"budget_policy": "cost"}))
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: costly)
    out = tmp_path / "out.json"
    words = "budgets --policies plain,fixed:2,fixed:8,adaptive --limit 3 --max-tokens 12 --prompts"
    code, output = run(words, prompt_file, "--out", out)
    assert code == 0, output
    report = json.loads(out.read_text())
    assert [row["policy"] for row in report["rows"]] == ["plain", "fixed:2", "fixed:8", "adaptive"]
    assert report["rows"][-1]["adaptive_over_it"] == [1.0, 1.0, 1.0]
    speeds = {row["policy"]: row["tokens_per_second"] for row in report["rows"][1:3]}
    assert report["summary"]["best_fixed"] == max(speeds, key=speeds.__getitem__)
    assert report["summary"]["mismatched_tokens"] == 0


def test_steps_are_grouped_by_their_rows() -> None:
    steps = [
        TimedStep(replace(STEP, prompt_tokens=0, verify_rows=rows, verify_seconds=0.1, predicted_verify_seconds=0.2), 1)
        for rows in 20 * [3] + 19 * [4]
    ]
    found = run_steps([Run((), tuple(steps), 1.0)])
    assert found == {3: {"steps": 20, "milliseconds": 100.0, "predicted_over_measured": 2.0}}


@pytest.mark.skipif(library.variant() is None, reason="no kernels are compiled")
def test_distinct_experts_of_a_forward_are_counted(tmp_path: Path) -> None:
    vocabulary = gguf_file(EMBEDDED_NAME)
    assert vocabulary is not None
    shape = Shape(256, 2, 4, 2, 64, 256, 49152, False, "qwen3moe", experts=8, chosen=2)
    write_shape(tmp_path / "a.gguf", shape, "q4_k_m", vocabulary)
    target = assemble(settings_for(tmp_path).model_copy(update={"model": str(tmp_path / "a.gguf")})).target
    assert target.runs_by_ops
    trial = Trial(target, sequences=1, max_length=100)

    def forward(tokens: list[int]) -> list[float]:
        rows, logits = trial.run([ExtendRows(0, 0, tokens, completes=True)])
        trial.free(rows)
        return logits.flatten().tolist()

    expected = forward([3])
    assert experts_of(target, partial(forward, [3])) == 2
    more = experts_of(target, partial(forward, trial.random_tokens(40)))
    assert more is not None
    assert 4 < more <= 8
    assert forward([3]) == expected
    assert experts_of(tiny_target(loaded_tiny("llama"), 100), lambda: None) is None
