import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptation.config import Tuning
from adaptation.evaluator import TextScores
from adaptation.monitor import Alarm, PairedCusum, RollbackMonitor
from tests.adaptation.streams import Texts

WINDOW = 16
SEEDS = range(20)


def cusum() -> PairedCusum:
    return PairedCusum(threshold=6.0, least_pairs=8)


def reason(alarm: Alarm | None) -> str:
    assert alarm is not None
    return alarm.reason


def window(texts: Texts, quality: float) -> tuple[list[float], list[float]]:
    """Serving drafter of this quality and anchor on the same texts."""
    chances = texts.difficulties(WINDOW)
    return texts.scores(chances, quality), texts.scores(chances)


def test_false_alarms_are_as_rare_as_promised() -> None:
    texts, alarm = Texts(100), cusum()
    fired = 0
    for _ in range(4000):
        if alarm.observe(*window(texts, 1.0)):
            fired += 1
            alarm.reset()
    assert 1 <= fired <= 12  # 16,000 groups, once in some 2,600


@pytest.mark.parametrize("seed", SEEDS)
def test_a_poisoned_drafter_is_seen_within_one_window(seed: int) -> None:
    texts, alarm = Texts(seed), cusum()
    for _ in range(seed):
        assert alarm.observe(*window(texts, 1.05)) is None
    assert reason(alarm.observe(*window(texts, 0.15))) == "worse_than_anchor"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slightly_worse_drafter_is_seen_in_time(seed: int) -> None:
    texts, alarm = Texts(seed), cusum()
    assert any(alarm.observe(*window(texts, 0.85)) for _ in range(20))


def test_harder_texts_are_no_alarm() -> None:
    alarm = cusum()
    easy, hard = Texts(1, easiness=0.7), Texts(2, easiness=0.2)
    for _ in range(5):
        assert alarm.observe(*window(easy, 1.05)) is None
    for _ in range(20):
        assert alarm.observe(*window(hard, 1.05)) is None


def test_two_equal_drafters_are_never_an_alarm() -> None:
    alarm = cusum()
    for _ in range(50):
        assert alarm.observe([1.5] * WINDOW, [1.5] * WINDOW) is None
    assert alarm.state()["total"] == 0.0


def test_a_score_that_is_no_number_is_an_alarm_only_for_the_drafter_that_serves() -> None:
    alarm = cusum()
    before = alarm.state()
    broken = [1.0] * 7 + [math.nan]
    assert reason(alarm.observe(broken, [1.0] * 8)) == "not_finite"
    assert alarm.observe([1.0] * 8, broken) is None
    assert alarm.state() == before


def test_too_few_pairs_say_nothing() -> None:
    alarm = cusum()
    assert alarm.observe([1.0] * 7, [5.0] * 7) is None
    assert alarm.observe([], []) is None


def test_a_new_drafter_starts_from_zero_with_the_spread_that_is_known() -> None:
    texts, alarm = Texts(3), cusum()
    alarm.observe(*window(texts, 0.15))
    alarm.reset()
    state = alarm.state()
    assert state["total"] == 0.0
    assert state["freedom"] == WINDOW - 1


@given(st.lists(st.floats(1, 9), min_size=24, max_size=24), st.lists(st.floats(1, 9), min_size=24, max_size=24))
def test_it_goes_on_where_it_stopped(serving: list[float], anchor: list[float]) -> None:
    first, second = cusum(), cusum()
    first.observe(serving[:12], anchor[:12])
    second.restore(json.loads(json.dumps(first.state())))
    assert second.observe(serving[12:], anchor[12:]) == first.observe(serving[12:], anchor[12:])
    assert second.state() == first.state()


def test_a_foreign_state_is_refused() -> None:
    alarm = cusum()
    before = alarm.state()
    with pytest.raises(ValueError, match="surprise"):
        alarm.restore({"surprise": 1})
    assert alarm.state() == before


def watch() -> RollbackMonitor:
    made = RollbackMonitor(Tuning(alarm_texts=4))
    made.weights_changed()
    return made


def feed(watched: RollbackMonitor, pairs: list[TextScores]) -> list[Alarm]:
    return [alarm for pair in pairs if (alarm := watched.observe(pair)) is not None]


def test_worse_than_the_anchor_is_seen_within_a_window() -> None:
    alarms = feed(watch(), [TextScores(1.0, 2.0 + 0.1 * number, None) for number in range(8)])
    assert {alarm.reason for alarm in alarms} == {"worse_than_anchor"}


def test_worse_than_before_is_seen_within_a_window_though_no_worse_than_the_anchor() -> None:
    alarms = feed(watch(), [TextScores(1.0, 1.0, 2.0 + 0.1 * number) for number in range(8)])
    assert {alarm.reason for alarm in alarms} == {"worse_than_before"}


def test_new_weights_are_on_probation_for_four_windows() -> None:
    watched = watch()
    assert [watched.take_probation() for _ in range(18)] == [True] * 16 + [False] * 2
