"""The last events with their time, and how many of each kind there were; nothing is kept from whoever listens."""

from adaptation.records import Event, History


def test_events_are_counted_kept_and_passed_on() -> None:
    heard: list[Event] = []
    times = iter([10.0, 20.0, 30.0])
    history = History(heard.append, now=lambda: next(times))
    events = [Event("published", 1, "better", {"candidate": 2.0}), Event("alarm", 1, "falling"), Event("alarm", 1, "x")]
    for event in events:
        history(event)
    assert heard == events
    assert history.counts == {"published": 1, "alarm": 2}
    assert [(past.unix_seconds, past.kind, past.reason) for past in history.last] == [
        (10.0, "published", "better"),
        (20.0, "alarm", "falling"),
        (30.0, "alarm", "x"),
    ]
    assert history.last[0].numbers == {"candidate": 2.0}


def test_the_oldest_events_are_forgotten() -> None:
    history = History(lambda _: None)
    for version in range(120):
        history(Event("refused", version, "within_noise"))
    assert [past.version for past in history.last] == list(range(70, 120))
    assert history.counts["refused"] == 120
