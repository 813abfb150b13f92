import math
import random
from collections.abc import Iterator

import pytest

from adaptation.traffic import ChangeDetector


def change() -> ChangeDetector:
    return ChangeDetector()


def scores(mean: float, *, seed: int = 0, spread: float = 0.1) -> Iterator[float]:
    rng = random.Random(seed)
    while True:
        yield rng.gauss(mean, spread)


def first_change(traffic: ChangeDetector, queries: Iterator[float], most: int) -> int | None:
    return next((number for number, score in zip(range(most), queries, strict=False) if traffic.observe(score)), None)


@pytest.mark.parametrize("now", [0.2, 0.6])
@pytest.mark.parametrize("seed", range(3, 13))
def test_other_traffic_is_soon_noticed(now: float, seed: int) -> None:
    traffic = change()
    assert first_change(traffic, scores(0.4, seed=seed), 150) is None
    found = first_change(traffic, scores(now, seed=seed + 100), 40)
    assert found is not None
    assert found < 20


def test_the_same_traffic_is_seldom_called_another() -> None:
    traffic, queries = change(), scores(0.4)
    assert sum(traffic.observe(next(queries)) for _ in range(30_000)) < 10


def test_one_odd_query_changes_nothing() -> None:
    traffic = change()
    assert first_change(traffic, scores(0.4), 100) is None
    assert not traffic.observe(50.0)
    assert not traffic.observe(-50.0)


def test_what_is_usual_is_learnt_anew_after_a_change() -> None:
    traffic = change()
    first_change(traffic, scores(0.4), 150)
    assert first_change(traffic, scores(0.8), 40) is not None
    assert first_change(traffic, scores(0.8, seed=1), 150) is None
    assert first_change(traffic, scores(0.4, seed=2), 40) is not None


def test_a_slow_drift_is_no_change() -> None:
    traffic, noise = change(), scores(0.0)
    assert not any(traffic.observe(0.3 + number * 0.0002 + next(noise)) for number in range(400))


def test_what_is_no_number_says_nothing() -> None:
    traffic, told = change(), change()
    for score in (0.3, 0.4, 0.5) * 20:
        assert not traffic.observe(math.nan)
        assert traffic.observe(score) == told.observe(score)


def test_nothing_is_suspected_while_nobody_knows_what_is_usual() -> None:
    early, late = change(), change()
    early.suspect()
    for score in (0.4, 0.5) * 12:
        assert not early.observe(score)
        assert not late.observe(score)
    late.suspect()
    assert [traffic.observe(0.9) or traffic.observe(0.9) for traffic in (early, late)] == [False, True]


def test_equal_scores_are_no_change() -> None:
    traffic = change()
    assert not any(traffic.observe(0.5) for _ in range(200))


def test_queries_of_which_little_is_known_count_together() -> None:
    few, told = change(), change()
    rng = random.Random(0)
    for _ in range(100):
        parts = [[rng.gauss(0.4, 0.1) for _ in range(count)] for count in (1, 6, 0, 9)]
        heard = [few.observe_values(part) for part in parts]
        assert heard[:3] == [False] * 3
        assert heard[3] == told.observe(sum(map(sum, parts)) / 16)


@pytest.mark.parametrize(("now", "found"), [(0.2, False), (0.6, True)])
def test_falling_scores_may_be_nothing_new(now: float, found: bool) -> None:
    traffic = ChangeDetector(memory=32, only_rising=True)
    assert first_change(traffic, scores(0.4), 150) is None
    assert (first_change(traffic, scores(now, seed=1), 40) is not None) is found
