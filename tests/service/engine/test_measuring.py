"""What is measured at start-up: usable tables, nothing left behind; kept for the very same machine and model."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from drafters.memory.drafter import MemoryDrafter
from drafters.protocol import Drafter, DraftingSizes
from service.engine import measuring
from service.engine.costs import CostKey, Costs, CostTable, DraftCosts, cost_file, read_costs, write_costs
from service.engine.engine import EngineLimits
from service.engine.measuring import (
    MeasuredFor,
    Point,
    costs_at_start,
    measure_drafts,
    measure_grid,
)
from tests.service.engine.harness import tiny_target
from tests.tiny_models import loaded_tiny

torch.set_num_threads(1)

LIMITS = EngineLimits(max_model_len=128, max_sequences=4, prefill_chunk=64, max_budget=8)
KEY: CostKey = {"machine": "m x 2", "device": "cpu", "model": "abc", "drafter": "memory 1", "threads": 1}
COSTS = Costs(
    CostTable(
        sequences=np.array([1.0, 4.0]),
        contexts=np.array([128.0]),
        rows=np.array([1.0, 8.0]),
        seconds=np.array([[[0.1, 1 / 3]], [[0.2, 0.5]]]),
    ),
    DraftCosts(batches=np.array([1.0, 4.0]), seconds=np.array([0.01, 0.02])),
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that moves only when somebody adds to it."""
    now = [0.0]
    monkeypatch.setattr("service.engine.measuring.time.perf_counter", lambda: now[0])
    return now


def measured(run: Callable[[Point], None], rows: tuple[int, ...], contexts: tuple[int, ...]) -> CostTable:
    """The table of one sequence, for which everything is possible."""
    return measure_grid(run, (1,), contexts, rows, most_rows=lambda sequences: max(rows))


def test_measuring_fills_the_grid(clock: list[float]) -> None:
    def run(point: Point) -> None:
        clock[0] += point.rows + point.context / 100

    table = measured(run, (1, 2, 4), (100, 300))
    assert table.seconds.tolist() == [[[2.0, 3.0, 5.0], [4.0, 5.0, 7.0]]]
    assert (table.rows.tolist(), table.contexts.tolist()) == ([1, 2, 4], [100, 300])


def test_noise_never_makes_a_larger_forward_cheaper(clock: list[float]) -> None:
    noise = itertools.cycle([5.0, 1.0, 3.0, 0.5, 2.0, 7.0, 0.1])

    def run(point: Point) -> None:
        clock[0] += next(noise)

    seconds = measured(run, (1, 2, 4, 8), (100, 300, 500)).seconds[0]
    assert (np.diff(seconds, axis=0) >= 0).all()
    assert (np.diff(seconds, axis=1) >= 0).all()


def test_a_slow_point_drags_no_larger_one_with_it(clock: list[float]) -> None:
    def run(point: Point) -> None:
        clock[0] += 40.0 if point.rows == 2 else point.rows

    assert measured(run, (1, 2, 4), (10,)).seconds.tolist() == [[[1.0, 4.0, 4.0]]]


def test_a_grid_with_sequences_times_what_they_can_have(clock: list[float]) -> None:
    asked: set[Point] = set()
    heard: list[tuple[int, int]] = []

    def run(point: Point) -> None:
        asked.add(point)
        clock[0] += point.rows + point.sequences * point.context / 100

    table = measure_grid(
        run,
        (1, 4),
        (100, 300),
        (1, 2, 4, 8),
        most_rows=lambda sequences: 4 * sequences,
        progress=lambda done, total: heard.append((done, total)),
    )
    assert {(p.sequences, p.rows) for p in asked} == {(1, 1), (1, 2), (1, 4), (4, 4), (4, 8)}
    assert heard[0] == (0, len(asked))
    assert heard[-1] == (len(asked), len(asked))
    for sequences, context, rows in itertools.product((1, 4), (100, 300), (4.0, 8.0)):
        expected = rows + sequences * context / 100
        assert float(table.verify_seconds(np.array([rows]), context, sequences)[0]) == pytest.approx(expected)


def test_noise_at_the_last_point_is_not_extended_below_zero(clock: list[float]) -> None:
    """One sequence has at most 4 rows, and by chance two took much longer."""

    def run(point: Point) -> None:
        clock[0] += {1: 0.1, 2: 5.0, 4: 0.2}.get(point.rows, 6.0)

    table = measure_grid(run, (1, 4), (100,), (1, 2, 4, 8, 192), most_rows=lambda sequences: 4 * sequences)
    assert (table.verify_seconds(np.arange(1.0, 200.0), 100) >= 0.1).all()


def test_noise_at_the_first_point_makes_no_longer_context_free(clock: list[float]) -> None:
    def run(point: Point) -> None:
        clock[0] += 9.0 if point == Point(1, 100, 1) else 1.0

    assert (measured(run, (1, 2, 4), (100, 300)).seconds > 0.9).all()


def memory() -> Drafter:
    return MemoryDrafter(DraftingSizes(max_sequences=4, max_length=256, max_nodes=8))


def costs_of(folder: Path, progress: list[tuple[int, int]], drafter: str = "memory") -> Costs:
    return costs_at_start(
        tiny_target(loaded_tiny("llama"), 700),
        memory,
        LIMITS,
        MeasuredFor("tiny", drafter, "0"),
        folder=folder,
        progress=lambda done, total: progress.append((done, total)),
    )


def test_costs_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_CLEARLY", 1e9)
    progress: list[tuple[int, int]] = []
    first = costs_of(tmp_path, progress)
    assert progress[-1][0] == progress[-1][1] > 5
    progress.clear()
    again = costs_of(tmp_path, progress)
    assert progress == []
    assert np.array_equal(first.verify.seconds, again.verify.seconds)
    costs_of(tmp_path, progress, drafter="other")
    assert progress


def test_what_was_measured_beside_other_work_is_measured_again(tmp_path: Path) -> None:
    found = costs_of(tmp_path, [])
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    content["verify"]["seconds"] = (1_000 * found.verify.seconds).tolist()
    file.write_text(json.dumps(content))
    progress: list[tuple[int, int]] = []
    again = costs_of(tmp_path, progress)
    assert progress
    assert again.verify.seconds.max() < 100 * found.verify.seconds.max()


def test_measuring_drafts_fills_every_batch() -> None:
    costs = measure_drafts(memory(), tiny_target(loaded_tiny("llama"), 100), batches=(1, 4))
    assert costs.batches.tolist() == [1, 4]
    assert 0 < costs.seconds[0] <= costs.seconds[1]


def test_what_was_measured_is_read_again_to_the_bit(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    write_costs(folder, KEY, COSTS)
    again = read_costs(folder, KEY)
    assert again is not None
    for name in ("sequences", "contexts", "rows", "seconds"):
        assert np.array_equal(getattr(again.verify, name), getattr(COSTS.verify, name))
    assert np.array_equal(again.drafts.seconds, COSTS.drafts.seconds)
    assert list(folder.iterdir()) == [cost_file(folder, KEY)]


@pytest.mark.parametrize("name", KEY)
def test_any_other_key_is_measured_by_itself(tmp_path: Path, name: str) -> None:
    write_costs(tmp_path, KEY, COSTS)
    assert read_costs(tmp_path, {**KEY, name: "other"}) is None


def test_a_file_under_the_wrong_name_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = {**KEY, "threads": 2}
    write_costs(tmp_path, other, COSTS)
    cost_file(tmp_path, other).rename(cost_file(tmp_path, KEY))
    assert read_costs(tmp_path, KEY) is None
    assert "belong to something else" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "empty", "shape", "nan"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    file = cost_file(tmp_path, KEY)
    write_costs(tmp_path, KEY, COSTS)
    text = file.read_text()
    file.write_text(
        {
            "cut": text[: len(text) // 2],
            "empty": "",
            "shape": text.replace("[1.0, 8.0]", "[1.0]"),
            "nan": text.replace("0.5", "NaN"),
        }[damage]
    )
    assert read_costs(tmp_path, KEY) is None
    assert "cannot be read" in caplog.text
    write_costs(tmp_path, KEY, COSTS)
    assert read_costs(tmp_path, KEY) is not None


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    write_costs(blocked, KEY, COSTS)
    assert "cannot be kept" in caplog.text
