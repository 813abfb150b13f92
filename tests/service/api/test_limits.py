"""The arithmetic of limits, by a clock that is moved by hand."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.limits import MonthlyUse, PerMinute, PerMonth, duration


@dataclass
class ByHand:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (1e-10, "0s"),
        (0.0001, "1ms"),
        (0.012, "12ms"),
        (0.9995, "1s"),
        (1, "1s"),
        (8.64, "8.64s"),
        (59.9991, "1m0s"),
        (60, "1m0s"),
        (172.8, "2m52.8s"),
        (360, "6m0s"),
        (3605.5, "1h0m5.5s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_minute_refills_all_the_time_and_no_further() -> None:
    clock = ByHand()
    limit = PerMinute(60, clock=clock)
    limit.reserve(60)
    limit.use(60)
    assert limit.remaining == 0
    assert [limit.reset_seconds, limit.seconds_until(10)] == pytest.approx([60, 10])
    clock.seconds = 10
    assert (limit.remaining, limit.seconds_until(10)) == (10, 0)
    clock.seconds = 1000
    assert (limit.remaining, limit.reset_seconds) == (60, 0)


def test_what_is_held_is_not_there_and_comes_back_unused() -> None:
    clock = ByHand()
    limit = PerMinute(100, clock=clock)
    limit.reserve(80)
    limit.use(30)
    assert limit.remaining == 20
    limit.release(50)
    assert limit.remaining == 70
    limit.reserve(70)
    clock.seconds = 18  # what was used is there again, what is held is not
    assert limit.remaining == 30


Steps = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 60), st.integers(0, 60), st.booleans()), max_size=30)


@given(Steps)
def test_no_span_of_time_has_more_than_its_share(steps: list[tuple[float, int, int, bool]]) -> None:
    """Requests that overlap, each holding a lot and using some of it, now or when the next one has come."""
    clock, running = ByHand(), list[tuple[int, int]]()
    limit = PerMinute(60, clock=clock)
    used: list[tuple[float, int]] = []

    def end(held: int, uses: int) -> None:
        limit.use(uses)
        limit.release(held - uses)
        used.append((clock.seconds, uses))

    for wait, asked, uses, waits in steps:
        clock.seconds += wait
        if asked <= limit.remaining:
            limit.reserve(asked)
            running.append((asked, min(uses, asked)))
        while running and not waits:
            end(*running.pop())
    for first, (begin, _) in enumerate(used):
        for last in range(first, len(used)):
            span = used[last][0] - begin
            assert sum(amount for _, amount in used[first : last + 1]) <= 60 * (1 + span / 60) + 0.001


def test_a_month_begins_anew_on_its_first_day_in_utc(tmp_path: Path) -> None:
    today = [datetime(2026, 12, 31, 23, 59, 58, tzinfo=UTC)]
    budget = PerMonth(100, MonthlyUse(tmp_path, now=lambda: today[0]), "acme")
    budget.reserve(90)
    budget.use(40)
    assert (budget.used, budget.remaining) == (40, 10)
    assert budget.next_month == ("2027-01-01T00:00:00Z", 2.0)
    today[0] = datetime(2027, 1, 1, tzinfo=UTC)
    assert (budget.used, budget.remaining) == (0, 50)
    budget.use(30)
    budget.release(20)
    assert (budget.used, budget.remaining) == (30, 70)
    assert budget.next_month == ("2027-02-01T00:00:00Z", 31 * 86400)
