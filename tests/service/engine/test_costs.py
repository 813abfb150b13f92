"""Predicted costs: between measured points and beyond them, and as the machine is now."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from drafters.memory.drafter import MemoryDrafter
from drafters.protocol import Drafter, DraftingSizes
from service.engine import measuring
from service.engine.costs import FREE, CostKey, Costs, CostTable, DraftCosts, OnlineCosts, OnlineDraftCosts, cost_file
from service.engine.engine import EngineLimits
from service.engine.measuring import (
    Point,
    costs_at_start,
    dummy_texts,
    measure_drafts,
    measure_grid,
    place_point,
)
from tests.service.engine.harness import tiny_target
from tests.tiny_models import loaded_tiny

TABLE = CostTable(
    sequences=np.array([1.0]),
    contexts=np.array([100.0, 300.0]),
    rows=np.array([1.0, 2.0, 4.0]),
    seconds=np.array([[[1.0, 2.0, 6.0], [3.0, 4.0, 10.0]]]),
)
ONE_CONTEXT = CostTable(
    sequences=np.array([1.0]),
    contexts=np.array([1.0]),
    rows=np.array([1.0, 2.0, 64.0]),
    seconds=np.array([[[1.0, 1.5, 8.0]]]),
)
DRAFTS = DraftCosts(batches=np.array([1.0, 5.0]), seconds=np.array([0.1, 0.3]))


@pytest.mark.parametrize(
    ("rows", "context", "seconds"),
    [
        (1, 100, 1.0),
        (4, 300, 10.0),
        (3, 100, 4.0),
        (1, 200, 2.0),
        (3, 200, 5.5),
        (6, 100, 10.0),  # beyond the last row point
        (1, 400, 4.0),  # beyond the last context
        (1, 10, 1.0),  # before the first context
        (0, 100, 1.0),
    ],
)
def test_seconds_between_and_beyond_the_points(rows: float, context: float, seconds: float) -> None:
    assert TABLE.verify_seconds(np.array([rows]), context).tolist() == [pytest.approx(seconds)]


def test_one_context_is_enough() -> None:
    table = CostTable(
        sequences=TABLE.sequences, contexts=TABLE.contexts[:1], rows=TABLE.rows, seconds=TABLE.seconds[:, :1]
    )
    for context in (1, 100, 1000):
        assert table.verify_seconds(np.array([1.0, 2.0, 3.0]), context).tolist() == [1.0, 2.0, 4.0]


def test_more_sequences_cost_more() -> None:
    table = CostTable(
        sequences=np.array([1.0, 5.0]),
        contexts=TABLE.contexts,
        rows=TABLE.rows,
        seconds=np.concatenate([TABLE.seconds, 3 * TABLE.seconds]),
    )
    rows = np.array([4.0])
    assert [float(table.verify_seconds(rows, 100, count)[0]) for count in (1, 3, 5, 9)] == [6.0, 12.0, 18.0, 30.0]


def seconds(costs: OnlineCosts, rows: float) -> float:
    return float(costs.verify_seconds((rows,), 1.0, 1)[0])


def test_a_slower_machine_is_noticed_everywhere_and_first_where_it_is_seen() -> None:
    costs = OnlineCosts(ONE_CONTEXT)
    for _ in range(10):
        costs.learn(2, 1.0, 1, 3.0)
    assert 2.4 < seconds(costs, 2.0) <= 3.0
    assert 8.0 < seconds(costs, 64.0) < 16.0
    for _ in range(60):
        costs.learn(2, 1.0, 1, 3.0)
    assert abs(seconds(costs, 2.0) / 3.0 - 1.0) < 0.01


def test_an_error_of_many_rows_is_not_taken_for_one_of_few() -> None:
    costs = OnlineCosts(ONE_CONTEXT)
    many = 1.3 * seconds(costs, 16.0)
    for step in range(120):
        costs.learn(16, 1.0, 1, many)
        if step % 16 < 4:
            costs.learn(2, 1.0, 1, 1.5)
    assert abs(seconds(costs, 16.0) / many - 1.0) < 0.01
    assert abs(seconds(costs, 2.0) / 1.5 - 1.0) < 0.05


def test_an_error_of_trees_is_not_taken_for_one_of_more_sequences() -> None:
    costs = OnlineCosts(ONE_CONTEXT)
    for _ in range(60):
        costs.learn(16, 1.0, 8, 6.0)
    costs.learn(16, 1.0, 16, 4.0)
    of_8 = float(costs.verify_seconds((16.0,), 1.0, 8)[0])
    assert 5.9 < of_8 < 6.0, "the day may have changed a little"
    for _ in range(60):
        costs.learn(16, 1.0, 16, 4.0)
    of_16 = float(costs.verify_seconds((16.0,), 1.0, 16)[0])
    assert abs(of_16 / 4.0 - 1.0) < 0.01
    assert float(costs.verify_seconds((16.0,), 1.0, 8)[0]) > 1.25 * of_16


def test_rows_of_prompts_do_not_pay_for_scores() -> None:
    """So prompts do not make the rows of trees look cheap: a forward takes 0.9 a row, and scores 0.1 a row."""
    rows = np.array([1.0, 128.0])
    each = CostTable(sequences=np.ones(1), contexts=np.ones(1), rows=rows, seconds=rows[None, None])
    costs = OnlineCosts(each, head_share=0.1)
    assert costs.verify_seconds((64,), 1.0, 4, 60) == pytest.approx(57.6 + 0.4)
    before, after = costs.verify_seconds((64, 72), 1.0, 4, 60)
    assert after - before == pytest.approx(8.0)
    for _ in range(60):
        assert costs.learn(64, 1.0, 4, 58.0, 60) == pytest.approx(58.0)
    assert costs.forward_seconds(4, 1.0, 4) == pytest.approx(4.0)
    assert costs.forward_seconds(64, 1.0, 4) == pytest.approx(64.0)


def test_another_size_of_batch_begins_with_what_is_known_of_the_day() -> None:
    costs = OnlineCosts(ONE_CONTEXT)
    for _ in range(60):
        costs.learn(2, 1.0, 1, 3.0)
    of_two = float(costs.verify_seconds((2.0,), 1.0, 2)[0])
    assert abs(of_two / 3.0 - 1.0) < 0.01


def test_one_hiccup_moves_little() -> None:
    costs = OnlineCosts(ONE_CONTEXT)
    for _ in range(10):
        costs.learn(2, 1.0, 1, 1.5)
    costs.learn(2, 1.0, 1, 500.0)
    assert seconds(costs, 2.0) < 1.5 * 1.11


def test_it_says_what_it_had_predicted() -> None:
    costs = OnlineCosts(ONE_CONTEXT)
    assert costs.learn(2, 1.0, 1, 3.0) == 1.5
    assert costs.learn(64, 1.0, 1, 0.0) == seconds(costs, 64.0)  # no time passed: nothing learnt


def test_corrections_have_no_jumps() -> None:
    costs = OnlineCosts(ONE_CONTEXT)
    for _ in range(50):
        costs.learn(16, 1.0, 1, 20.0)
        costs.learn(33, 1.0, 1, 1.0)
    curve = costs.verify_seconds(tuple(np.linspace(1.0, 64.0, 2_000)), 1.0, 1)
    assert np.abs(np.diff(np.log(curve))).max() < 0.03


def test_a_bump_that_no_one_runs_into_is_no_trap() -> None:
    """What was slow for some reason long ago, between rows that are run: a budget must not fall for what is behind."""
    costs = OnlineCosts(ONE_CONTEXT)
    for _ in range(8):
        costs.learn(24, 1.0, 1, 2.0 * float(ONE_CONTEXT.verify_seconds(np.array([24.0]), 1.0, 1)[0]))
    for _ in range(150):
        costs.learn(8, 1.0, 1, float(ONE_CONTEXT.verify_seconds(np.array([8.0]), 1.0, 1)[0]))
        costs.learn(64, 1.0, 1, 8.0)
    assert seconds(costs, 64.0) - seconds(costs, 24.0) > 0.7 * (
        8.0 - ONE_CONTEXT.verify_seconds(np.array([24.0]), 1.0, 1)[0]
    )


def test_what_was_run_in_a_slow_minute_only_is_not_thought_slow_for_good() -> None:
    costs = OnlineCosts(ONE_CONTEXT)
    for _ in range(60):
        costs.learn(2, 1.0, 1, 3.0)
        costs.learn(16, 1.0, 1, 5.0)
    for _ in range(60):
        costs.learn(2, 1.0, 1, 1.5)
    assert abs(seconds(costs, 2.0) / 1.5 - 1.0) < 0.01
    assert seconds(costs, 16.0) < 3.2


def test_seconds_between_the_measured_batches() -> None:
    assert [DRAFTS.draft_seconds(batch) for batch in (1, 3, 5, 50)] == [pytest.approx(s) for s in (0.1, 0.2, 0.3, 0.3)]


def test_what_drafting_takes_now_is_followed_by_size_of_batch() -> None:
    online = OnlineDraftCosts(DRAFTS)
    for _ in range(100):
        online.learn(1, 0.2)
    assert online.draft_seconds(1) == pytest.approx(0.2, rel=0.01)
    assert online.draft_seconds(5) == pytest.approx(0.3)


def test_a_hiccup_is_not_the_price_of_drafting() -> None:
    online = OnlineDraftCosts(DRAFTS)
    assert online.learn(1, 50.0) == pytest.approx(0.4)
    assert online.draft_seconds(1) < 0.14


def test_a_drafter_that_was_not_measured_costs_what_it_first_took() -> None:
    online = OnlineDraftCosts(FREE)
    assert online.draft_seconds(1) == 0.0
    assert online.learn(1, 0.2) == 0.2
    assert online.draft_seconds(1) == 0.2


def test_steps_of_more_rows_than_shapes_are_kept_for_are_learnt_from() -> None:
    """64 sequences of 48 nodes are 3,136 rows."""
    costs = OnlineCosts(ONE_CONTEXT)
    before = seconds(costs, 3136.0)
    costs.learn(3136, 0.0, 64, 0.5 * before)
    assert seconds(costs, 3136.0) < before


# What is measured at start-up: usable tables, nothing left behind; kept for the very same machine and model.


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


def test_rows_of_a_measured_forward_have_different_tokens() -> None:
    """Rows of one token would wake the same experts, and further rows would seem free."""
    trial = dummy_texts(tiny_target(loaded_tiny("llama"), 700), sequences=3, length=20)
    rows = place_point(trial, Point(3, 20, 32))
    assert rows.num_rows == 32
    assert len(set(rows.tokens.tolist())) > 16


def memory() -> Drafter:
    return MemoryDrafter(DraftingSizes(max_sequences=4, max_length=256, max_nodes=8))


def costs_of(folder: Path, progress: list[tuple[int, int]], drafter: str = "memory") -> Costs:
    return costs_at_start(
        tiny_target(loaded_tiny("llama"), 700),
        memory,
        LIMITS,
        {"model": "tiny", "drafter": drafter, "version": "0"},
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
    COSTS.write(folder, KEY)
    again = Costs.read(folder, KEY)
    assert again is not None
    for name in ("sequences", "contexts", "rows", "seconds"):
        assert np.array_equal(getattr(again.verify, name), getattr(COSTS.verify, name))
    assert np.array_equal(again.drafts.seconds, COSTS.drafts.seconds)
    assert list(folder.iterdir()) == [cost_file(folder, KEY)]


@pytest.mark.parametrize("name", KEY)
def test_any_other_key_is_measured_by_itself(tmp_path: Path, name: str) -> None:
    COSTS.write(tmp_path, KEY)
    assert Costs.read(tmp_path, {**KEY, name: "other"}) is None


def test_a_file_under_the_wrong_name_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = {**KEY, "threads": 2}
    COSTS.write(tmp_path, other)
    cost_file(tmp_path, other).rename(cost_file(tmp_path, KEY))
    assert Costs.read(tmp_path, KEY) is None
    assert "the file has another key" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "empty", "shape", "nan"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    file = cost_file(tmp_path, KEY)
    COSTS.write(tmp_path, KEY)
    text = file.read_text()
    file.write_text(
        {
            "cut": text[: len(text) // 2],
            "empty": "",
            "shape": text.replace("[1.0, 8.0]", "[1.0]"),
            "nan": text.replace("0.5", "NaN"),
        }[damage]
    )
    assert Costs.read(tmp_path, KEY) is None
    assert "cannot read the measured costs" in caplog.text
    COSTS.write(tmp_path, KEY)
    assert Costs.read(tmp_path, KEY) is not None


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    COSTS.write(blocked, KEY)
    assert "cannot save measurements" in caplog.text


def test_a_node_that_cannot_pay_is_less_likely_than_half_its_price() -> None:
    """A plain step takes 1 second and drafting 0.1; from 1 to 64 rows each takes 0.11 more."""
    slope = (8.0 - 1.0) / 63
    assert Costs(ONE_CONTEXT, DRAFTS).least_that_pays == pytest.approx(slope / 1.1 / 2)
    few_rows = replace(ONE_CONTEXT, rows=np.array([1.0, 2.0, 4.0]))
    assert Costs(few_rows, DRAFTS).least_that_pays == 0.0, "no row stands out from noise"
