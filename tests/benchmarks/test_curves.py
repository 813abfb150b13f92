"""How curves of learning are measured: what memory and network have right, and what updates cost and give."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.curves import agreement
from tests.service.bench.parts import assembled, save_drafter, save_two_layers, written_prompts

Command = Callable[..., tuple[int, str]]


def test_versions_agree_as_far_as_their_order_does() -> None:
    gains = [(1.0, 1.0), (1.2, 1.1), (1.4, 1.2), (0.8, 0.9)]
    rows = [{"tau": mine, "served_tau": other, "gain": [mine], "served_gain": [other]} for mine, other in gains]
    assert agreement(rows) == pytest.approx({"rank_correlation": 1.0, "served_over_replayed_gain": 0.5})
    rows[0]["served_tau"] = 2.0
    assert agreement(rows)["rank_correlation"] < 1.0


def test_a_run_has_a_row_for_each_number_of_updates(run: Command, tmp_path: Path) -> None:
    folder = save_two_layers(tmp_path / "model")
    drafter = save_drafter(tmp_path / "drafter", assembled(folder))
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("\n".join(list(written_prompts()) * 3))
    code, output = run(
        *("curves", "--prompts", prompts, "--out", out, "--model", folder, "--load-dtype", "float32", "--drafter-path"),
        *(drafter, "--drafter", "memory+specblock", "--threads", 1, "--max-model-len", 256, "--device", "cpu"),
        *("--state-dir", tmp_path, "--train", 5, "--held-out", 4, "--updates", "1,3", "--max-tokens", 24),
        *("--damaged", 1),
    )
    assert code == 0, output
    rows = json.loads(out.read_text())["rows"]
    marks = [(arm, n) for arm in ("head", "full") for n in (0, 1, 3)]
    assert [(row["arm"], row["updates"]) for row in rows] == [*marks, ("damaged", 1)]
    for before, *trained in (rows[:3], rows[3:6]):
        assert before["gain"] == [1.0, 1.0, 1.0]
        assert before["cpu_seconds"] == 0 < trained[0]["cpu_seconds"] < trained[1]["cpu_seconds"]
        assert all(min(row["tau"], row["served_tau"], row["tau_of_the_network"]) >= 1 for row in trained)
    assert rows[3]["tau_of_the_network"] != rows[5]["tau_of_the_network"]
    assert "tau, served" in output
