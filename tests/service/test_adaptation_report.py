"""One line and one count per event."""

import logging

import pytest

from adaptation.records import Event
from service.adaptation_report import report
from tests.service.test_metrics import made, series


def test_an_event_is_one_line_and_one_count(caplog: pytest.LogCaptureFixture) -> None:
    metrics = made()
    with caplog.at_level(logging.INFO):
        report(Event("published", 3, "better", {"candidate": 2.12345, "serving": 2.0}), metrics)
    (record,) = caplog.records
    assert record.getMessage() == "learning: published (better), drafter version 3: candidate 2.123, serving 2"
    assert (record.levelname, record.__dict__["event"], record.__dict__["reason"]) == ("INFO", "published", "better")
    assert record.__dict__["numbers"] == {"candidate": 2.12345, "serving": 2.0}
    assert series(metrics)["adaptree_adaptation_events_total{published better}"] == 1


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (Event("rolled_back", 4, "collapsed"), "WARNING"),
        (Event("failed", 4, "update: ValueError: two\nlines"), "WARNING"),
        (Event("refused", 4, "within_noise"), "INFO"),
    ],
)
def test_what_is_worth_a_look_is_a_warning(event: Event, level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        report(event, made())
    (record,) = caplog.records
    assert record.levelname == level
    assert "\n" not in record.getMessage()
