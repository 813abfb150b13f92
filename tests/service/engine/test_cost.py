"""What a verify costs: interpolation between measured points, extension beyond them, and measuring itself."""

import itertools

import numpy as np
import pytest

from service.engine.cost import CostTable, Point, measure, measure_grid

TABLE = CostTable(
    sequences=np.array([1.0]),
    contexts=np.array([100.0, 300.0]),
    rows=np.array([1.0, 2.0, 4.0]),
    seconds=np.array([[[1.0, 2.0, 6.0], [3.0, 4.0, 10.0]]]),
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that moves only when somebody adds to it."""
    now = [0.0]
    monkeypatch.setattr("service.engine.cost.time.perf_counter", lambda: now[0])
    return now


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


def test_measuring_fills_the_grid(clock: list[float]) -> None:
    def run(rows: int, context: int) -> None:
        clock[0] += rows + context / 100

    table = measure(run, (1, 2, 4), (100, 300))
    assert table.seconds.tolist() == [[[2.0, 3.0, 5.0], [4.0, 5.0, 7.0]]]
    assert (table.rows.tolist(), table.contexts.tolist()) == ([1, 2, 4], [100, 300])


def test_noise_never_makes_a_larger_forward_cheaper(clock: list[float]) -> None:
    noise = itertools.cycle([5.0, 1.0, 3.0, 0.5, 2.0, 7.0, 0.1])

    def run(rows: int, context: int) -> None:
        clock[0] += next(noise)

    seconds = measure(run, (1, 2, 4, 8), (100, 300, 500)).seconds[0]
    assert (np.diff(seconds, axis=0) >= 0).all()
    assert (np.diff(seconds, axis=1) >= 0).all()


def test_a_single_slow_run_is_forgotten(clock: list[float]) -> None:
    seconds = iter([0.05, 0.01, 0.09, 0.01])

    def run(rows: int, context: int) -> None:
        clock[0] += next(seconds)

    assert measure(run, (1,), (10,)).seconds.tolist() == [[[pytest.approx(0.01)]]]


def test_a_slow_point_drags_no_larger_one_with_it(clock: list[float]) -> None:
    def run(rows: int, context: int) -> None:
        clock[0] += 40.0 if rows == 2 else rows

    assert measure(run, (1, 2, 4), (10,)).seconds.tolist() == [[[1.0, 4.0, 4.0]]]


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
