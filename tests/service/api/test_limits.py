"""The arithmetic of limits, by a clock that is moved by hand."""

import asyncio
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api import tenants
from service.api.tenants import BUDGETS_FILE, MonthlyUse, PerMinute, PerMonth, duration
from service.errors import StartupError


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
    limit.use(60, reserved=60)
    assert limit.remaining == 0
    assert [limit.reset_seconds, limit.seconds_until(10)] == pytest.approx([60, 10])
    clock.seconds = 10
    assert (limit.remaining, limit.seconds_until(10)) == (10, 0)
    clock.seconds = 1000
    assert (limit.remaining, limit.reset_seconds) == (60, 0)


Steps = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 60), st.integers(0, 60), st.booleans()), max_size=30)


@given(Steps)
def test_no_span_of_time_has_more_than_its_share(steps: list[tuple[float, int, int, bool]]) -> None:
    """Requests that overlap, each holding a lot and using some of it, now or when the next one has come."""
    clock, running = ByHand(), list[tuple[int, int]]()
    limit = PerMinute(60, clock=clock)
    used: list[tuple[float, int]] = []

    def end(held: int, uses: int) -> None:
        limit.use(uses, reserved=uses)
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
    budget.use(40, reserved=40)
    assert (budget.used, budget.remaining) == (40, 10)
    assert budget.months.next_month == ("2027-01-01T00:00:00Z", 2.0)
    today[0] = datetime(2027, 1, 1, tzinfo=UTC)
    assert (budget.used, budget.remaining) == (0, 50)
    budget.use(30, reserved=30)
    budget.release(20)
    assert (budget.used, budget.remaining) == (30, 70)
    assert budget.months.next_month == ("2027-02-01T00:00:00Z", 31 * 86400)


# Counts that outlive the process that made them.


async def test_counts_are_written_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "SAVE_SECONDS", 0.01)
    use = MonthlyUse(tmp_path)
    async with use.kept():
        use.add("acme", 5)
        while not (tmp_path / BUDGETS_FILE).exists():
            await asyncio.sleep(0.01)
        assert json.loads((tmp_path / BUDGETS_FILE).read_text())["used_tokens"] == {"acme": 5}


async def test_counts_of_an_earlier_month_are_none(tmp_path: Path) -> None:
    (tmp_path / BUDGETS_FILE).write_text('{"month": "2001-01", "used_tokens": {"acme": 5}}')
    use = MonthlyUse(tmp_path)
    async with use.kept():
        assert use.of("acme") == 0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"month": "2026-11"}', '{"month": "2026-11", "used_tokens": {"a": -1}}']
)
async def test_a_damaged_file_stops_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / BUDGETS_FILE).write_text(text)
    with pytest.raises(StartupError, match=r"cannot be read: .*; remove the file"):
        MonthlyUse(tmp_path)


async def test_two_servers_cannot_keep_one_file(tmp_path: Path) -> None:
    async with MonthlyUse(tmp_path).kept():
        with pytest.raises(StartupError, match="give this one its own state_dir"):
            MonthlyUse(tmp_path)
    async with MonthlyUse(tmp_path).kept():
        pass


async def test_a_folder_that_is_none_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="change state_dir"):
        MonthlyUse(tmp_path / "file")


async def test_a_disk_that_refuses_is_reported_once_and_costs_no_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tenants, "SAVE_SECONDS", 0.01)
    attempts = 0

    def refuse(file: Path, data: bytes) -> None:
        nonlocal attempts
        attempts += 1
        raise OSError("no space left")

    monkeypatch.setattr(tenants, "replace_file", refuse)
    use = MonthlyUse(tmp_path)
    async with use.kept():
        use.add("acme", 5)
        while attempts < 2:
            await asyncio.sleep(0.01)
        assert use.of("acme") == 5
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "no space left" in caplog.text
