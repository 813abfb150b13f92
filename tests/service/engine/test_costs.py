"""Predicted costs: between measured points and beyond them, and as the machine is now."""

import numpy as np
import pytest

from service.engine.costs import FREE, CostTable, DraftCosts, OnlineCosts, OnlineDraftCosts

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
    return float(costs.verify_seconds(np.array([rows]), 1.0, 1)[0])


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
    of_8 = float(costs.verify_seconds(np.array([16.0]), 1.0, 8)[0])
    assert 5.9 < of_8 < 6.0, "the day may have changed a little"
    for _ in range(60):
        costs.learn(16, 1.0, 16, 4.0)
    of_16 = float(costs.verify_seconds(np.array([16.0]), 1.0, 16)[0])
    assert abs(of_16 / 4.0 - 1.0) < 0.01
    assert float(costs.verify_seconds(np.array([16.0]), 1.0, 8)[0]) > 1.25 * of_16


def test_another_size_of_batch_begins_with_what_is_known_of_the_day() -> None:
    costs = OnlineCosts(ONE_CONTEXT)
    for _ in range(60):
        costs.learn(2, 1.0, 1, 3.0)
    of_two = float(costs.verify_seconds(np.array([2.0]), 1.0, 2)[0])
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
    curve = costs.verify_seconds(np.linspace(1.0, 64.0, 2_000), 1.0, 1)
    assert np.abs(np.diff(np.log(curve))).max() < 0.03


def test_a_bump_that_nobody_runs_into_is_no_trap() -> None:
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
