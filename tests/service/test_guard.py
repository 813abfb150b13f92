"""What only keeps books may fail: it is counted, logged now and then, and off after three failures in a row."""

import logging

import pytest

from service.observability.guard import Guard


def breaks() -> int:
    raise ValueError("planted")


def fails(guard: Guard, times: int = 1) -> list[int]:
    return [guard.run("charge", breaks, lambda: -1) for _ in range(times)]


def test_three_in_a_row_switch_a_part_off_and_no_other() -> None:
    guard = Guard(now=lambda: 7.0)
    assert fails(guard, 2) == [-1, -1]
    assert guard.run("charge", lambda: 1, lambda: -1) == 1
    assert fails(guard, 2) == [-1, -1]
    assert not guard.is_off("charge")
    fails(guard)
    assert (guard.errors, guard.switched_off) == ({"charge": 5}, {"charge": 7.0})
    assert guard.run("charge", lambda: 1, lambda: -1) == -1
    assert guard.run("learn", lambda: 1, lambda: -1) == 1
    assert guard.errors == {"charge": 5}, "a part that is off is not called"


def test_a_traceback_a_minute_and_one_line_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    seconds = iter([0.0, 1.0, 61.0])
    guard = Guard(clock=lambda: next(seconds))
    fails(guard, 9)
    lines = [(record.getMessage(), record.exc_info is not None) for record in caplog.records]
    failed = ("bookkeeping part 'charge' failed; generation is not affected", True)
    off = "bookkeeping part 'charge' is switched off until a restart; generation is not affected"
    assert lines == [failed, failed, (off, False)]
    assert all(record.levelno == logging.ERROR for record in caplog.records)


def test_what_goes_on_by_itself_is_counted_only() -> None:
    guard = Guard()
    for _ in range(9):
        guard.count("adaptation")
    assert (guard.errors, guard.switched_off) == ({"adaptation": 9}, {})
