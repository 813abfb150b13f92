import pytest

from adaptation.monitor import Alarm, RollbackMonitor, TextScores


def watch() -> RollbackMonitor:
    made = RollbackMonitor(window=8, fall_standard_errors=3.0, collapse_verifies=8)
    made.weights_changed()
    return made


def feed(watched: RollbackMonitor, pairs: list[TextScores]) -> list[Alarm]:
    return [alarm for pair in pairs if (alarm := watched.observe_scores(pair)) is not None]


def test_worse_than_the_anchor_is_seen_within_a_window() -> None:
    alarms = feed(watch(), [TextScores(1.0, 2.0 + 0.1 * number, None) for number in range(8)])
    assert {alarm.reason for alarm in alarms} == {"worse_than_anchor"}


def test_worse_than_before_is_seen_within_a_window_though_no_worse_than_the_anchor() -> None:
    alarms = feed(watch(), [TextScores(1.0, 1.0, 2.0 + 0.1 * number) for number in range(8)])
    assert {alarm.reason for alarm in alarms} == {"worse_than_before"}


def test_better_is_no_alarm() -> None:
    assert feed(watch(), [TextScores(2.0 + 0.1 * number, 1.0, 1.5) for number in range(64)]) == []


def test_a_window_is_judged_when_it_is_full() -> None:
    watched = watch()
    pairs = [TextScores(1.0, 2.0 + 0.1 * number, None) for number in range(4)]
    assert feed(watched, pairs[:3]) == []
    assert len(feed(watched, pairs[3:])) == 1


def test_a_collapse_is_seen_and_forgotten_with_its_weights() -> None:
    watched = watch()
    assert watched.observe_served([0] * 7) is None
    alarm = watched.observe_served([0])
    assert alarm is not None
    assert (alarm.reason, watched.collapsed) == ("collapsed", True)
    watched.weights_changed()
    assert not watched.collapsed


def test_a_steep_fall_is_seen_after_three_windows() -> None:
    watched = watch()
    heard = [watched.observe_served([level, level + number % 2]) for level in (6, 4, 2) for number in range(8)]
    assert [alarm.reason for alarm in heard if alarm is not None] == ["falling"]
    assert heard[-1] is not None


def test_a_query_without_drafted_nodes_says_nothing() -> None:
    watched = watch()
    assert [watched.observe_served([]) for _ in range(100)] == [None] * 100


def test_new_weights_are_on_probation_for_two_windows() -> None:
    watched = watch()
    assert [watched.take_probation() for _ in range(18)] == [True] * 16 + [False] * 2


def test_state_goes_on() -> None:
    one, other = watch(), watch()
    feed(one, [TextScores(1.0, 1.1 + 0.1 * number, 1.2) for number in range(4)])
    for name, state in one.state().items():
        other.restore(name, state)
    assert one.state() == other.state()
    with pytest.raises(ValueError, match="no such alarm"):
        other.restore("elsewhere", {})


def test_a_fall_over_a_change_of_traffic_is_none() -> None:
    watched = watch()
    for level in (6, 4):
        for number in range(8):
            assert watched.observe_served([level, level + number % 2]) is None
    watched.traffic_changed()
    assert [watched.observe_served([2, 2 + number % 2]) for number in range(16)] == [None] * 16
