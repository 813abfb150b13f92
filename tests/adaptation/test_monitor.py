import json
import math
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptation.config import Tuning
from adaptation.monitor import Alarm, Collapse, FallingWindows, PairedCusum, RollbackMonitor, TextScores
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


def test_the_sum_is_that_of_the_formula() -> None:
    alarm = cusum()
    serving, anchor = [1.0, 2.0] * 4, [2.0, 2.5] * 4
    differences = [-1.0, -0.5] * 4
    step = 0.75 / (stdev(differences) / math.sqrt(4)) - 0.5
    for steps in (2, 4):
        seen = alarm.observe(serving, anchor)
        assert seen is not None
        assert seen.statistic == pytest.approx(steps * step)


@pytest.mark.parametrize("seed", SEEDS)
def test_at_most_two_false_alarms_in_200_windows_of_a_drafter_that_equals_the_anchor(seed: int) -> None:
    texts, alarm = Texts(seed), cusum()
    fired = 0
    for _ in range(200):
        if alarm.observe(*window(texts, 1.0)):
            fired += 1
            alarm.reset()
    assert fired <= 2


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


def false_falls(standard_errors: float, seed: int, windows: int) -> int:
    texts, rule = Texts(seed), FallingWindows(standard_errors=standard_errors)
    return sum(rule.observe(texts.scores(texts.difficulties(WINDOW))) is not None for _ in range(windows))


def test_the_bare_rule_fires_in_one_of_six_windows_of_noise() -> None:
    assert 1 / 6 - 0.02 < false_falls(0.0, seed=0, windows=4000) / 4000 < 1 / 6 + 0.02


@pytest.mark.parametrize("seed", SEEDS)
def test_with_its_condition_it_hardly_ever_does(seed: int) -> None:
    assert false_falls(3.0, seed, windows=200) <= 2


def test_a_real_fall_is_seen() -> None:
    texts, rule = Texts(0), FallingWindows(standard_errors=3.0)
    *early, last = [rule.observe(texts.scores(texts.difficulties(WINDOW), quality)) for quality in (1.0, 0.7, 0.3)]
    assert early == [None, None]
    assert last is not None
    assert (last.reason, last.statistic > 3.0) == ("falling", True)


def test_only_three_falls_in_a_row_count() -> None:
    rule = FallingWindows(standard_errors=0.0)
    fired = [bool(rule.observe([mean - 0.1, mean + 0.1])) for mean in (3.0, 2.0, 2.5, 2.4, 2.4, 2.3, 2.2)]
    assert fired == [False] * 6 + [True]


def test_windows_that_are_none_are_passed_over_and_a_new_drafter_starts_anew() -> None:
    rule = FallingWindows(standard_errors=0.0)
    for scores in ([3.0, 3.0], [], [2.0], [math.nan, 2.0], [2.0, 2.0]):
        assert rule.observe(scores) is None
    resumed = FallingWindows(standard_errors=0.0)
    resumed.restore(json.loads(json.dumps(rule.state())))
    assert resumed.observe([1.0, 1.0]) == rule.observe([1.0, 1.0])
    assert rule.observe([0.5, 0.5]) is not None
    rule.reset()
    assert rule.observe([0.1, 0.1]) is None


def test_a_drafter_that_earns_nothing_has_collapsed_until_it_earns_again() -> None:
    alarm = Collapse(least_verifies=64)
    seen = [(alarm.observe(emitted, 32) is not None, alarm.collapsed) for emitted in (33, 33, 33, 60)]
    assert seen == [(False, False), (True, True), (False, True), (False, False)]


def test_a_collapse_is_told_once() -> None:
    alarm = Collapse(least_verifies=64)
    assert [bool(alarm.observe(emitted, 64)) for emitted in (64, 64, 128, 64)] == [True, False, False, True]


@pytest.mark.parametrize(("emitted", "collapsed"), [(64, True), (67, True), (68, False), (128, False)])
def test_collapse_means_less_than_the_margin_per_verify(emitted: int, collapsed: bool) -> None:
    assert bool(Collapse(least_verifies=64).observe(emitted, 64)) == collapsed


def test_collapse_is_resumed_and_reset() -> None:
    first, second = Collapse(least_verifies=8), Collapse(least_verifies=8)
    first.observe(8, 8)
    first.observe(3, 2)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.collapsed
    assert second.observe(6, 6) == first.observe(6, 6)
    first.reset()
    assert not first.collapsed


@pytest.mark.parametrize("alarm", [cusum(), FallingWindows(standard_errors=3.0), Collapse(least_verifies=8)])
def test_a_foreign_state_is_refused(alarm: PairedCusum | FallingWindows | Collapse) -> None:
    before = alarm.state()
    with pytest.raises(ValueError, match="surprise"):
        alarm.restore({"surprise": 1})
    assert alarm.state() == before


def watch() -> RollbackMonitor:
    made = RollbackMonitor(Tuning(window_texts=8, fall_standard_errors=3.0, collapse_verifies=8))
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
