"""What a second adds up to, what is kept of the last minutes, and that observing waits for no one."""

from dataclasses import replace

import pytest

from adaptation.records import Event
from service.engine.stats import StepStats
from service.observability.live import KEPT_MOMENTS, Live
from tests.service.scripted import STATUS
from tests.service.test_metrics import FINISH, LOAD, MEMORY, STEP


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def live_at(clock: Clock) -> Live:
    return Live(now=lambda: 1_000 + clock.seconds, clock=clock)


def test_a_second_is_added_up() -> None:
    clock = Clock()
    live = live_at(clock)
    live.observe_load(LOAD)
    live.observe_step(STEP)
    live.observe_step(replace(STEP, drafted_nodes=7, budget_reason="load"))
    live.observe_step(replace(STEP, drafted_nodes=3, accepted_by_source={"memory": 1}))
    live.observe_finish(FINISH)
    clock.seconds += 2
    moment = live.tick()
    assert (moment["unix_seconds"], moment["seconds"]) == (1_102, 2)
    assert (moment["tokens_per_second"], moment["prompt_tokens_per_second"]) == (9, 10.5)
    assert moment["tau"] == 1 + 12 / 6
    assert (moment["budget"], moment["budget_reason"]) == (10, "gain")
    assert moment["accepted_by_source"] == {"memory": 7, "specblock": 4}
    assert moment["phase_seconds"] == {"draft": 0.75, "verify": 1.5, "other": 0.375}
    assert moment["finished"] == {"stop": 1}
    assert (moment["running"], moment["waiting"], moment["slots_used_share"]) == (3, 2, 0.25)
    assert (moment["learning"], moment["events"], moment["drafting"]) == (None, [], None)
    live.observe_step(STEP)
    live.observe_step(replace(STEP, memory=replace(MEMORY, remembered_tokens=9)))
    for _ in range(2):
        assert live.tick()["memory"] == replace(MEMORY, remembered_tokens=9), "it holds until the next report"
    assert [point["accepted_by_source"] for point in live.past()["points"]] == [
        {"memory": 7, "specblock": 4},
        {"memory": 6, "specblock": 4},
        {},
    ]


def test_a_second_in_which_nothing_happens() -> None:
    clock = Clock()
    live = live_at(clock)
    live.observe_load(LOAD)
    live.observe_step(STEP)
    live.tick()
    clock.seconds += 1
    moment = live.tick()
    assert (moment["tau"], moment["budget"], moment["budget_reason"], moment["tokens_per_second"]) == (
        None,
        None,
        None,
        0,
    )
    assert moment["running"] == 3  # the load holds until the next report


def first_token(stats: StepStats) -> StepStats:
    return replace(stats, itl_seconds=(), accepted_tokens=0)


def test_reading_a_prompt_is_no_verify() -> None:
    live = Live()
    live.observe_step(first_token(STEP))
    assert live.tick()["tau"] is None


def test_two_ticks_at_once_divide_by_nothing() -> None:
    live = live_at(Clock())
    live.observe_step(STEP)
    assert live.tick()["tokens_per_second"] == 0


def test_learning_is_shown_as_last_reported() -> None:
    live = Live()
    live.observe_adaptation(STATUS)
    for _ in range(2):
        learning = live.tick()["learning"]
        assert learning == replace(STATUS, events=())
    assert [point["version"] for point in live.past()["points"]] == [2, 2]
    assert live.past()["points"][0]["values"] == STATUS.values


@pytest.mark.parametrize(
    ("reason", "shown"), [("operator", "operator"), ("cannot read /somewhere/secret/drafter.json", "other")]
)
def test_an_event_is_sent_once_and_kept_in_closed_words(reason: str, shown: str) -> None:
    clock = Clock()
    live = live_at(clock)
    live.observe_event(Event("loaded", 4, reason, {"tau": 2.5}))
    (event,) = live.tick()["events"]
    assert (event["kind"], event["reason"], event["version"], event["numbers"]) == ("loaded", shown, 4, {"tau": 2.5})
    assert event["unix_seconds"] == 1_100
    assert live.tick()["events"] == []
    assert live.past()["events"] == [event]


def test_the_past_is_bounded_and_oldest_first() -> None:
    clock = Clock()
    live = live_at(clock)
    for _ in range(KEPT_MOMENTS + 7):
        clock.seconds += 1
        live.tick()
    times = [point["unix_seconds"] for point in live.past()["points"]]
    assert len(times) == KEPT_MOMENTS
    assert times == sorted(times)
    assert times[-1] == 1_000 + clock.seconds


def test_speed_is_compared_with_plain_decoding_since_the_start() -> None:
    live = Live()
    live.observe_step(STEP)  # not measured
    assert live.tick()["against_plain"] is None
    measured = replace(STEP, saved_seconds=0.25)
    for _ in range(700):
        live.observe_step(measured)
        live.observe_step(STEP)
        now = live.tick()["against_plain"]
    assert now == {"tokens": 6, "seconds": STEP.seconds, "plain_seconds": STEP.seconds + 0.25}
    spans = live.past()["since_start"]
    assert 100 < len(spans) <= 240
    assert [sum(span[place] for span in spans) for place in range(3)] == pytest.approx(
        [700 * 6, 700 * STEP.seconds, 700 * (STEP.seconds + 0.25)]
    )
    assert {span.seconds for span in spans[:-1]} == {spans[0].seconds}, "equally long, but for the last"


def test_records_without_a_reader_do_not_pile_up() -> None:
    live = Live()
    for _ in range(70_000):
        live.observe_finish(FINISH)
    assert live.tick()["finished"]["stop"] == 65_536


# What a terminal shows of a feed, and what is shown where there is none.
