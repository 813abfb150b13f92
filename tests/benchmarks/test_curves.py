"""How curves of learning are measured: what memory and network have right, and what updates cost and give."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.curves import Memory
from drafters.training.replay import walked
from tests.adaptation.samples import feedback
from tests.service.bench.parts import assembled, save_drafter, save_two_layers, written_prompts

Command = Callable[..., tuple[int, str]]


def steps(accepted: list[int]) -> int:
    return walked(torch.tensor(accepted), 1).steps


def test_a_step_emits_what_is_accepted_and_one_more() -> None:
    assert steps([0, 0, 0]) == 3
    assert steps([2, 0, 0, 1, 5]) == 2
    assert steps([]) == 0


def test_the_memory_has_an_answer_right_that_it_read_before() -> None:
    memory, once = Memory(), feedback(1, answer=30)
    first, again = memory.read(once), memory.read(once)
    assert len(first) == len(again) == len(once.query.answer)
    assert sum(again) > sum(first)


def test_a_run_has_a_row_for_each_number_of_updates(run: Command, tmp_path: Path) -> None:
    folder = save_two_layers(tmp_path / "model")
    drafter = save_drafter(tmp_path / "drafter", assembled(folder))
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("\n".join(list(written_prompts()) * 3))
    code, output = run(
        *("curves", "--prompts", prompts, "--out", out, "--model", folder, "--load-dtype", "float32", "--drafter-path"),
        *(drafter, "--drafter", "memory+specblock", "--threads", 1, "--max-model-len", 256, "--device", "cpu"),
        *("--state-dir", tmp_path, "--train", 5, "--held-out", 4, "--updates", "1,3", "--max-tokens", 24),
    )
    assert code == 0, output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["arm"], row["updates"]) for row in rows] == [(arm, n) for arm in ("head", "full") for n in (0, 1, 3)]
    for before, *trained in (rows[:3], rows[3:]):
        assert before["gain"] == [1.0, 1.0, 1.0]
        assert before["cpu_seconds"] == 0 < trained[0]["cpu_seconds"] < trained[1]["cpu_seconds"]
        assert all(row["tau"] >= row["tau_of_the_network"] >= 1 for row in trained)
    assert rows[3]["tau_of_the_network"] != rows[5]["tau_of_the_network"]
    assert "tau, with the memory" in output
