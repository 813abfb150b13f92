"""A table that is wrong about the day is soon right about it."""

import numpy as np

from service.engine.cost import CostTable
from service.engine.cost_online import OnlineCosts

TABLE = CostTable(
    sequences=np.array([1.0]),
    contexts=np.array([1.0]),
    rows=np.array([1.0, 2.0, 64.0]),
    seconds=np.array([[[1.0, 1.5, 8.0]]]),
)


def seconds(costs: OnlineCosts, rows: float) -> float:
    return float(costs.verify_seconds(np.array([rows]), 1.0, 1)[0])


def test_what_nothing_corrected_is_the_table() -> None:
    assert seconds(OnlineCosts(TABLE), 2.0) == 1.5


def test_a_slower_machine_is_noticed_everywhere_and_first_where_it_is_seen() -> None:
    costs = OnlineCosts(TABLE)
    for _ in range(10):
        costs.learn(2, 1.0, 1, 3.0)
    assert 2.4 < seconds(costs, 2.0) <= 3.0
    assert 8.0 < seconds(costs, 64.0) < 16.0
    for _ in range(60):
        costs.learn(2, 1.0, 1, 3.0)
    assert abs(seconds(costs, 2.0) / 3.0 - 1.0) < 0.01


def test_an_error_of_many_rows_is_not_taken_for_one_of_few() -> None:
    costs = OnlineCosts(TABLE)
    many = 1.3 * seconds(costs, 16.0)
    for step in range(120):
        costs.learn(16, 1.0, 1, many)
        if step % 16 < 4:
            costs.learn(2, 1.0, 1, 1.5)
    assert abs(seconds(costs, 16.0) / many - 1.0) < 0.01
    assert abs(seconds(costs, 2.0) / 1.5 - 1.0) < 0.05


def test_an_error_of_trees_is_not_taken_for_one_of_more_sequences() -> None:
    costs = OnlineCosts(TABLE)
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
    costs = OnlineCosts(TABLE)
    for _ in range(60):
        costs.learn(2, 1.0, 1, 3.0)
    of_two = float(costs.verify_seconds(np.array([2.0]), 1.0, 2)[0])
    assert abs(of_two / 3.0 - 1.0) < 0.01


def test_the_error_falls_as_it_learns() -> None:
    costs = OnlineCosts(TABLE)
    costs.learn(16, 1.0, 1, 6.0)
    first = costs.error
    for _ in range(200):
        costs.learn(16, 1.0, 1, 6.0)
    assert first > 0.3
    assert costs.error < 0.02


def test_one_hiccup_moves_little() -> None:
    costs = OnlineCosts(TABLE)
    for _ in range(10):
        costs.learn(2, 1.0, 1, 1.5)
    costs.learn(2, 1.0, 1, 500.0)
    assert seconds(costs, 2.0) < 1.5 * 1.11


def test_it_says_what_it_had_predicted() -> None:
    costs = OnlineCosts(TABLE)
    assert costs.learn(2, 1.0, 1, 3.0) == 1.5
    assert costs.learn(64, 1.0, 1, 0.0) == seconds(costs, 64.0)  # no time passed: nothing learnt


def test_corrections_have_no_jumps() -> None:
    costs = OnlineCosts(TABLE)
    for _ in range(50):
        costs.learn(16, 1.0, 1, 20.0)
        costs.learn(33, 1.0, 1, 1.0)
    curve = costs.verify_seconds(np.linspace(1.0, 64.0, 2_000), 1.0, 1)
    assert np.abs(np.diff(np.log(curve))).max() < 0.03


def test_a_bump_that_nobody_runs_into_is_no_trap() -> None:
    """What was slow for some reason long ago, between rows that are run: a budget must not fall for what is behind."""
    costs = OnlineCosts(TABLE)
    for _ in range(8):
        costs.learn(24, 1.0, 1, 2.0 * float(TABLE.verify_seconds(np.array([24.0]), 1.0, 1)[0]))
    for _ in range(150):
        costs.learn(8, 1.0, 1, float(TABLE.verify_seconds(np.array([8.0]), 1.0, 1)[0]))
        costs.learn(64, 1.0, 1, 8.0)
    assert seconds(costs, 64.0) - seconds(costs, 24.0) > 0.7 * (8.0 - TABLE.verify_seconds(np.array([24.0]), 1.0, 1)[0])


def test_what_was_run_in_a_slow_minute_only_is_not_thought_slow_for_good() -> None:
    costs = OnlineCosts(TABLE)
    for _ in range(60):
        costs.learn(2, 1.0, 1, 3.0)
        costs.learn(16, 1.0, 1, 5.0)
    for _ in range(60):
        costs.learn(2, 1.0, 1, 1.5)
    assert abs(seconds(costs, 2.0) / 1.5 - 1.0) < 0.01
    assert seconds(costs, 16.0) < 3.2
