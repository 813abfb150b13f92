"""Start-up measurement on a tiny target: a usable table, nothing left behind, and nothing measured twice."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from drafters.lookup.drafter import LookupDrafter
from drafters.protocol import Drafter
from service.engine import measuring
from service.engine.cost_cache import Costs
from tests.service.engine.harness import tiny_target
from tests.tiny_models import loaded_tiny

torch.set_num_threads(1)


def lookup(blocks: int) -> Drafter:
    return LookupDrafter(max_sequences=4, max_length=256, max_nodes=8, device="cpu")


def costs(folder: Path, progress: list[tuple[int, int]], drafter: str = "lookup") -> Costs:
    return measuring.costs_at_start(
        tiny_target(loaded_tiny("llama"), 700),
        lookup,
        folder=folder,
        model="tiny",
        drafter=drafter,
        version="0",
        max_blocks=1,
        max_sequences=4,
        max_model_len=128,
        max_budget=8,
        progress=lambda done, total: progress.append((done, total)),
    )


def test_costs_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_CLEARLY", 1e9)
    progress: list[tuple[int, int]] = []
    first = costs(tmp_path, progress)
    assert progress[-1][0] == progress[-1][1] > 5
    progress.clear()
    again = costs(tmp_path, progress)
    assert progress == []
    assert np.array_equal(first.verify.seconds, again.verify.seconds)
    costs(tmp_path, progress, drafter="other")
    assert progress


def test_what_was_measured_beside_other_work_is_measured_again(tmp_path: Path) -> None:
    found = costs(tmp_path, [])
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    content["verify"]["seconds"] = (1_000 * found.verify.seconds).tolist()
    file.write_text(json.dumps(content))
    progress: list[tuple[int, int]] = []
    again = costs(tmp_path, progress)
    assert progress
    assert again.verify.seconds.max() < 100 * found.verify.seconds.max()


def test_the_table_is_usable(tmp_path: Path) -> None:
    found = costs(tmp_path, [])
    rows = np.arange(1.0, 300.0)
    for context in (1.0, 90.0, 5_000.0):
        for sequences in (1, 3, 40):
            seconds = found.verify.verify_seconds(rows, context, sequences)
            assert np.isfinite(seconds).all()
            assert (seconds > 0).all()
            assert (np.diff(seconds) >= 0).all()
    assert 0 < found.drafts.draft_seconds(1) <= found.drafts.draft_seconds(4)


@pytest.mark.parametrize(("max_model_len", "num_slots"), [(16, 300), (64, 400), (1024, 5000)])
def test_any_pool_can_be_measured(max_model_len: int, num_slots: int) -> None:
    target = tiny_target(loaded_tiny("llama"), num_slots)
    before = target.pool.num_slots
    table = measuring.measure_costs(target, max_sequences=3, max_model_len=max_model_len, max_budget=8)
    assert table.contexts[-1] < max_model_len
    assert target.pool.num_slots == before
