"""What a verify costs: interpolation between measured points, extension beyond them, and measuring itself."""

import itertools

import pytest
import torch

from service.engine.cost import CostTable, measure

TABLE = CostTable(
    rows=torch.tensor([1.0, 2.0, 4.0]),
    contexts=torch.tensor([100.0, 300.0]),
    seconds=torch.tensor([[1.0, 2.0, 6.0], [3.0, 4.0, 10.0]]),
)


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
def test_seconds_between_and_beyond_the_points(rows: int, context: float, seconds: float) -> None:
    assert TABLE.verify_seconds(torch.tensor([rows]), context).tolist() == [pytest.approx(seconds)]


def test_one_context_is_enough() -> None:
    table = CostTable(TABLE.rows, TABLE.contexts[:1], TABLE.seconds[:1])
    for context in (1, 100, 1000):
        assert table.verify_seconds(torch.tensor([1, 2, 3]), context).tolist() == [1.0, 2.0, 4.0]


def test_measuring_fills_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only `run` moves."""
    now = [0.0]
    monkeypatch.setattr("service.engine.cost.time.perf_counter", lambda: now[0])

    def run(rows: int, context: int) -> None:
        now[0] += rows + context / 100

    table = measure(run, (1, 2, 4), (100, 300))
    assert torch.equal(table.seconds, torch.tensor([[2.0, 3.0, 5.0], [4.0, 5.0, 7.0]]))
    assert (table.rows.tolist(), table.contexts.tolist()) == ([1, 2, 4], [100, 300])


def test_noise_never_makes_a_larger_forward_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    now, noise = [0.0], itertools.cycle([5.0, 1.0, 3.0, 0.5, 2.0, 7.0, 0.1])
    monkeypatch.setattr("service.engine.cost.time.perf_counter", lambda: now[0])

    def run(rows: int, context: int) -> None:
        now[0] += next(noise)

    seconds = measure(run, (1, 2, 4, 8), (100, 300, 500)).seconds
    assert (seconds.diff(dim=0) >= 0).all()
    assert (seconds.diff(dim=1) >= 0).all()


def test_a_single_slow_run_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seconds = [0.0], iter([50.0, 1.0, 90.0, 1.0])
    monkeypatch.setattr("service.engine.cost.time.perf_counter", lambda: now[0])

    def run(rows: int, context: int) -> None:
        now[0] += next(seconds)

    assert measure(run, (1,), (10,)).seconds.tolist() == [[1.0]]
