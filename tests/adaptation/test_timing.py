"""Training computes as far as the ledger covers it, and in its share of idle time as long as that leads anywhere."""

from collections.abc import Callable

import pytest
import torch

from adaptation.timing import IdleTime, Pauses, TrainingTime
from tests.adaptation.worlds import Clock


def idle(share: float = 0.25) -> tuple[IdleTime, Clock]:
    clock = Clock()
    return IdleTime(share=share, least_failures=2, clock=clock), clock


@pytest.mark.parametrize(("share", "rest"), [(0.25, 30.0), (0.5, 10.0), (1.0, 0.0)])
def test_it_rests_so_long_that_its_share_is_kept(share: float, rest: float) -> None:
    time, clock = idle(share)
    assert time.may_begin(1, num_kept=1, pass_updates=1)
    time.ended(10.0, better=True)
    if rest:
        clock.now += rest - 0.1
        assert not time.may_begin(1, num_kept=1, pass_updates=1)
    clock.now += 0.2
    assert time.may_begin(1, num_kept=1, pass_updates=1)


def test_without_a_share_nothing_begins() -> None:
    time, _ = idle(0.0)
    assert not time.may_begin(1, num_kept=1, pass_updates=1)


def test_updates_in_vain_end_it_until_new_texts_come() -> None:
    time, _ = idle(1.0)
    for _ in range(2):
        assert time.may_begin(5, num_kept=5, pass_updates=1)
        time.ended(1.0, better=False)
    assert not time.may_begin(5, num_kept=5, pass_updates=1)
    assert time.may_begin(6, num_kept=6, pass_updates=1)


def test_it_ends_after_a_pass_and_begins_again_with_a_share_of_new_texts() -> None:
    time, _ = idle(1.0)
    for _ in range(5):
        assert time.may_begin(64, num_kept=64, pass_updates=5)
        time.ended(1.0, better=False)
    assert not time.may_begin(64 + 3, num_kept=64, pass_updates=5)
    assert time.may_begin(64 + 4, num_kept=64, pass_updates=5)


def test_a_publish_begins_the_count_anew() -> None:
    time, _ = idle(1.0)
    assert time.may_begin(5, num_kept=5, pass_updates=1)
    for better in (False, True, False):
        time.ended(1.0, better=better)
    assert time.may_begin(5, num_kept=5, pass_updates=1)


def timed(covered: float) -> tuple[TrainingTime, Clock]:
    """With so many seconds to take from serving, whose steps take 50 ms, and twice as long beside training."""
    clock = Clock()
    return timed_by(clock, lambda taken: taken < covered), clock


def timed_by(clock: Clock, covers: Callable[[float], bool]) -> TrainingTime:
    """Training that has a core to itself: its CPU time is that of the clock."""
    time = TrainingTime(torch.device("cpu"), covers, clock=clock)
    time._cpu_clock = clock
    return time


def step(time: TrainingTime, clock: Clock, seconds: float) -> None:
    time.stepping()
    clock.now += seconds
    time.stepped("decode", seconds)


def test_training_goes_on_as_far_as_serving_can_afford() -> None:
    """One percent of the time of serving is added to what it may take."""
    clock, balance, waited = Clock(), 1.0, 0
    trained = timed_by(clock, lambda taken: taken < balance)
    step(trained, clock, 0.05)
    charged = 0.0
    for _ in range(100):
        while not trained.may_compute:
            waited += 1
            balance += 0.01 * 0.05
            step(trained, clock, 0.05)
        with trained.spent():  # an optimizer step beside an engine step, which takes 0.3 times as long again
            step(trained, clock, 0.05 * 1.3)
            balance += 0.01 * 0.05
        charged += 0.05 * 1.3 * trained.taken_share
        assert trained._uncharged < balance + 0.05
    taken = trained.taken()
    assert taken == pytest.approx(charged)
    assert taken == pytest.approx(100 * 0.05 * 0.3, rel=0.01)
    assert waited > 20


def test_training_is_free_while_no_one_is_served() -> None:
    time, clock = timed(covered=0.0)
    for _ in range(100):
        assert time.may_compute
        with time.spent():
            clock.now += 0.05
    assert time.taken() == 0.0


def test_a_piece_amid_which_a_request_comes_is_charged() -> None:
    time, clock = timed(covered=0.0)
    with time.spent():
        clock.now += 0.10
        step(time, clock, 0.04)
    assert time.taken() == pytest.approx(0.14 * time.taken_share)
    assert not time.may_compute
    clock.now += 0.06
    assert time.may_compute, "it is answered"


@pytest.mark.parametrize(("pause", "beside"), [(0.14, True), (0.2, False)])
def test_a_server_with_pauses_trains_in_them_alone(pause: float, beside: bool) -> None:
    time, clock = timed(covered=1e9)
    for _ in range(10):
        step(time, clock, 0.05)
        clock.now += pause
    step(time, clock, 0.05)
    assert time.may_compute is beside
    clock.now += 0.06
    assert time.may_compute
    time.skip_pause()
    clock.now += 1e6
    step(time, clock, 0.05)
    assert time.may_compute is beside, "a time in which the server could not serve is no pause"


def test_a_step_that_never_ends_counts_for_a_while() -> None:
    time, clock = timed(covered=0.0)
    time.stepping()
    clock.now += 29.9
    assert not time.may_compute
    clock.now += 0.2
    assert time.may_compute


@pytest.mark.parametrize("longer", [0.0, 0.25, 1.0])
def test_what_training_takes_is_what_steps_beside_it_take_longer(longer: float) -> None:
    time, clock = timed(covered=1e9)
    for _ in range(20):
        for _ in range(50):
            step(time, clock, 0.05)
        with time.spent():
            for _ in range(50):
                step(time, clock, 0.05 * (1.0 + longer))
    longer = max(0.05, longer)
    assert time.taken_share == pytest.approx(longer / (1.0 + longer), abs=0.02)


def test_other_kinds_of_steps_and_hiccups_say_nothing_of_training() -> None:
    """Prompts, which are read while nothing is trained, take ten times as long."""
    time, clock = timed(covered=1e9)
    for _ in range(20):
        for number in range(50):
            clock.now += 0.5
            time.stepped("prompt", 0.5)
            step(time, clock, 0.2 if number == 7 else 0.05)
        with time.spent():
            for _ in range(50):
                step(time, clock, 0.05 * 1.25)
    assert time.taken_share == pytest.approx(0.2, abs=0.04)


def test_pauses_are_what_is_longer_than_the_way_to_the_next_step() -> None:
    """Nothing is known before the first step, and a day without pauses outweighs an idle night."""
    clock, needed = Clock(), Pauses(needed=True)
    time = TrainingTime(torch.device("cpu"), lambda seconds: True, needed, clock=clock)
    for pause, suffices in ((3600.0, False), (0.04, False), (0.14, False), (0.25, True), (0.0, True)):
        clock.now += pause
        step(time, clock, 0.05)
        assert needed.suffice() is suffices
        assert not time.is_idle
        assert not time.may_compute
    clock.now += 12 * 3600.0
    for _ in range(4 * 24):
        step(time, clock, 3600.0)
    assert not needed.suffice()
    assert Pauses().suffice()
