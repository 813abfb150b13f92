"""However bad something is, what it loses is bounded; however long it was bad, it comes back when it is good."""

import random

import pytest

from drafters.purse import ALLOWANCE, LIMIT, SHARE, TRIAL, Purse, PursesBySize


def play(purse: Purse, gains: list[float]) -> tuple[float, int]:
    """Steps with these gains where it goes on; returns the sum of what it gained and how often it went on."""
    total, tries = 0.0, 0
    for gain in gains:
        if purse.is_open:
            purse.settle(gain)
            total, tries = total + gain, tries + 1
        else:
            purse.rest()
    return total, tries


def test_a_loser_loses_the_allowance_and_a_share_of_the_time() -> None:
    for loss in (0.05, 0.5, 3.0):
        total, tries = play(Purse(), [-loss] * 5_000)
        assert -total <= ALLOWANCE + 5_000 * SHARE + loss
        assert tries > 10  # and is tried again and again


def test_a_winner_always_goes_on() -> None:
    assert play(Purse(), [0.1] * 1_000)[1] == 1_000


def test_it_comes_back_when_it_gains_again() -> None:
    purse = Purse()
    play(purse, [-0.5] * 1_000)
    play(purse, [0.5] * 300)
    assert play(purse, [0.5] * 100)[1] == 100


def test_past_gains_are_forgotten_beyond_the_limit() -> None:
    purse = Purse()
    play(purse, [1.0] * 1_000)
    assert purse.balance == LIMIT
    assert play(purse, [-1.0] * 100)[1] <= LIMIT + 2


def test_luck_alone_rarely_stops_a_winner() -> None:
    rng = random.Random(0)
    gains = [rng.choice([-0.4, -0.4, 0.6, 1.6]) for _ in range(4_000)]  # 0.35 on average
    assert play(Purse(), gains)[1] > 3_500


def test_sizes_have_purses_of_their_own() -> None:
    purses = PursesBySize()
    assert purses.of(4) is purses.of(7)
    play(purses.of(4), [-2 * ALLOWANCE])
    assert not purses.of(4).is_open
    assert purses.of(2).is_open
    assert purses.of(8).is_open


def test_the_more_sequences_the_smaller_the_purse() -> None:
    purses = PursesBySize()
    assert [purses.of(count).balance / ALLOWANCE for count in (1, 2, 4, 8, 16, 32)] == [1, 1, 1, 1 / 2, 1 / 4, 1 / 4]
    play(purses.of(16), [1.0] * 1_000)
    assert purses.of(16).balance == LIMIT / 4
    purses.of(16).settle(-1.0)
    purses.of(16).rest()
    assert purses.of(16).balance == pytest.approx(LIMIT / 4 - 1.0 + SHARE / 4)


def test_what_loses_for_many_is_doubted_for_more_but_not_for_fewer() -> None:
    purses = PursesBySize()
    purses.of(8).settle(-2 * ALLOWANCE)
    assert purses.of(16).balance == purses.of(8).balance < 0
    assert purses.of(4).balance == ALLOWANCE


def test_what_loses_for_few_says_nothing_of_many() -> None:
    purses = PursesBySize()
    purses.of(4).settle(-2 * ALLOWANCE)
    assert purses.of(8).is_open


def test_it_says_when_it_will_open() -> None:
    purse = Purse(allowance=-0.5, share=0.25, trial=1.0)
    assert not purse.opens_within(5)
    assert purse.opens_within(6)
    for _ in range(6):
        assert not purse.is_open
        purse.rest()
    assert purse.is_open
    assert purse.opens_within(0)


def test_a_trial_is_more_than_one_step() -> None:
    purse = Purse(allowance=-0.5)
    while not purse.is_open:
        purse.rest()
    assert play(purse, [-0.1] * 30)[1] >= TRIAL / 0.1


def test_what_gains_little_for_one_seldom_stands_down() -> None:
    """0.1 on average, as uneven as the trees of one sequence."""
    rng = random.Random(0)
    gains = [rng.choice([-0.4, -0.4, -0.4, 0.6, 0.6, 0.6]) for _ in range(20_000)]
    assert play(PursesBySize().of(1), gains)[1] > 0.9 * len(gains)


def test_a_small_purse_is_enough_for_many_because_they_gain_evenly() -> None:
    rng = random.Random(0)
    stopped = 0
    for _ in range(100):
        gains = [sum(rng.choice([-0.4, -0.4, 0.6, 1.6]) for _ in range(16)) / 16 - 0.25 for _ in range(400)]
        stopped += play(PursesBySize().of(16), gains)[1] < 300  # 0.1 on average
    assert stopped <= 20


def test_a_successor_is_tried_at_once_and_costs_half_an_allowance_at_most() -> None:
    purses = PursesBySize()
    play(purses.of(1), [-0.5] * 1_000)
    for size in (1, 16):
        purses.of(size).settle(-10 * ALLOWANCE)
    total = 0.0
    for _ in range(20):
        purses.renew()
        loss, tries = play(purses.of(1), [-0.1] * 20)
        assert tries > 10
        total -= loss
    assert total <= 20 * (ALLOWANCE / 2 + 0.1) + 1e-9
    assert purses.of(16).balance == ALLOWANCE / 8
    assert purses.of(64).balance == ALLOWANCE / 4, "nothing was lost at this size"


def test_a_successor_keeps_what_was_earned() -> None:
    purses = PursesBySize()
    play(purses.of(1), [1.0] * 1_000)
    earned = purses.of(1).balance
    assert earned == 4 * LIMIT
    purses.renew()
    assert purses.of(1).balance == earned
