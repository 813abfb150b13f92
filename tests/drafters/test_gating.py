"""However bad something is, what it loses is bounded; however long it was bad, it comes back when it is good."""

import random

import pytest

from drafters.gating import LIMIT, OPENING, SHARE, TRIAL, BlockGate, DrafterGate, FollowGate, LedgersBySize, LossLedger


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def play(ledger: LossLedger, gains: list[float]) -> tuple[float, int]:
    """Steps with these gains where it goes on; returns the sum of what it gained and how often it went on."""
    total, tries = 0.0, 0
    for gain in gains:
        if ledger.is_open:
            ledger.settle(gain)
            total, tries = total + gain, tries + 1
        else:
            ledger.rest()
    return total, tries


def test_a_loser_loses_the_opening_balance_and_a_share_of_the_time() -> None:
    for loss in (0.05, 0.5, 3.0):
        total, tries = play(LossLedger(), [-loss] * 5_000)
        assert -total <= OPENING + 5_000 * SHARE + loss
        assert tries > 10  # and is tried again and again


def test_a_winner_always_goes_on() -> None:
    assert play(LossLedger(), [0.1] * 1_000)[1] == 1_000


def test_it_comes_back_when_it_gains_again() -> None:
    ledger = LossLedger()
    play(ledger, [-0.5] * 1_000)
    play(ledger, [0.5] * 300)
    assert play(ledger, [0.5] * 100)[1] == 100


def test_past_gains_are_forgotten_beyond_the_limit() -> None:
    ledger = LossLedger()
    play(ledger, [1.0] * 1_000)
    assert ledger.balance == LIMIT
    assert play(ledger, [-1.0] * 100)[1] <= LIMIT + 2


def test_luck_alone_rarely_stops_a_winner() -> None:
    rng = random.Random(0)
    gains = [rng.choice([-0.4, -0.4, 0.6, 1.6]) for _ in range(4_000)]  # 0.35 on average
    assert play(LossLedger(), gains)[1] > 3_500


def test_sizes_have_ledgers_of_their_own() -> None:
    ledgers = LedgersBySize()
    assert ledgers.of(4) is ledgers.of(7)
    play(ledgers.of(4), [-2 * OPENING])
    assert not ledgers.of(4).is_open
    assert ledgers.of(2).is_open
    assert ledgers.of(8).is_open


def test_the_more_sequences_the_smaller_the_ledger() -> None:
    ledgers = LedgersBySize()
    assert [ledgers.of(count).balance / OPENING for count in (1, 2, 4, 8, 16, 32)] == [1, 1, 1, 1 / 2, 1 / 4, 1 / 4]
    play(ledgers.of(16), [1.0] * 1_000)
    assert ledgers.of(16).balance == LIMIT / 4
    ledgers.of(16).settle(-1.0)
    ledgers.of(16).rest()
    assert ledgers.of(16).balance == pytest.approx(LIMIT / 4 - 1.0 + SHARE / 4)


def test_what_loses_for_many_is_doubted_for_more_but_not_for_fewer() -> None:
    ledgers = LedgersBySize()
    ledgers.of(8).settle(-2 * OPENING)
    assert ledgers.of(16).balance == ledgers.of(8).balance < 0
    assert ledgers.of(4).balance == OPENING


def test_what_loses_for_few_says_nothing_of_many() -> None:
    ledgers = LedgersBySize()
    ledgers.of(4).settle(-2 * OPENING)
    assert ledgers.of(8).is_open


def test_it_says_when_it_will_open() -> None:
    ledger = LossLedger(opening=-0.5, share=0.25, trial=1.0)
    assert not ledger.opens_within(5)
    assert ledger.opens_within(6)
    for _ in range(6):
        assert not ledger.is_open
        ledger.rest()
    assert ledger.is_open
    assert ledger.opens_within(0)


def test_a_trial_is_more_than_one_step() -> None:
    ledger = LossLedger(opening=-0.5)
    while not ledger.is_open:
        ledger.rest()
    assert play(ledger, [-0.1] * 30)[1] >= TRIAL / 0.1


def test_what_gains_little_for_one_is_seldom_suspended() -> None:
    """0.1 on average, as uneven as the trees of one sequence."""
    rng = random.Random(0)
    gains = [rng.choice([-0.4, -0.4, -0.4, 0.6, 0.6, 0.6]) for _ in range(20_000)]
    assert play(LedgersBySize().of(1), gains)[1] > 0.9 * len(gains)


def test_a_small_ledger_is_enough_for_many_because_they_gain_evenly() -> None:
    rng = random.Random(0)
    stopped = 0
    for _ in range(100):
        gains = [sum(rng.choice([-0.4, -0.4, 0.6, 1.6]) for _ in range(16)) / 16 - 0.25 for _ in range(400)]
        stopped += play(LedgersBySize().of(16), gains)[1] < 300  # 0.1 on average
    assert stopped <= 20


def test_a_successor_is_tried_at_once_and_costs_half_an_opening_balance_at_most() -> None:
    ledgers = LedgersBySize()
    play(ledgers.of(1), [-0.5] * 1_000)
    for size in (1, 16):
        ledgers.of(size).settle(-10 * OPENING)
    total = 0.0
    for _ in range(20):
        ledgers.renew()
        loss, tries = play(ledgers.of(1), [-0.1] * 20)
        assert tries > 10
        total -= loss
    assert total <= 20 * (OPENING / 2 + 0.1) + 1e-9
    assert ledgers.of(16).balance == OPENING / 8
    assert ledgers.of(64).balance == OPENING / 4, "nothing was lost at this size"


def test_a_successor_keeps_what_was_earned() -> None:
    ledgers = LedgersBySize()
    play(ledgers.of(1), [1.0] * 1_000)
    earned = ledgers.of(1).balance
    assert earned == 4 * LIMIT
    ledgers.renew()
    assert ledgers.of(1).balance == earned


def ask(
    gate: DrafterGate, clock: Clock, steps: int, *, extra: int, expected: float = 0.0, cost: float = 0.1, batch: int = 1
) -> int:
    """So many steps of one second, each emitting 1 + extra tokens; returns how often the drafter was asked."""
    asked = 0
    for _ in range(steps):
        if gate.ask(expected, batch):
            asked += 1
            clock.now += cost
            gate.answered()
            clock.now += 1.0
            observe = gate.end()
            assert observe is not None
            observe([extra, 1 + extra])
    return asked


def test_a_drafter_that_pays_is_always_asked() -> None:
    clock = Clock()
    assert ask(DrafterGate(clock), clock, 200, extra=1) == 200


def test_a_drafter_that_never_helps_is_asked_now_and_then() -> None:
    clock = Clock()
    gate = DrafterGate(clock)
    ask(gate, clock, 50, extra=0)
    assert 0 < ask(gate, clock, 1_000, extra=0) * 0.1 <= 0.011 * 1_000


def test_it_comes_back_when_it_helps_again() -> None:
    clock = Clock()
    gate = DrafterGate(clock)
    ask(gate, clock, 100, extra=0)
    ask(gate, clock, 300, extra=2)
    assert ask(gate, clock, 100, extra=2) == 100


def test_ledgers_are_kept_by_what_is_expected_of_the_others() -> None:
    clock = Clock()
    gate = DrafterGate(clock)
    ask(gate, clock, 100, extra=0, expected=5.0)
    assert ask(gate, clock, 50, extra=1, expected=0.0) == 50
    assert ask(gate, clock, 40, extra=0, expected=5.0) < 6


def test_ledgers_are_kept_by_load() -> None:
    clock = Clock()
    gate = DrafterGate(clock)
    ask(gate, clock, 100, extra=0, batch=16)
    assert ask(gate, clock, 50, extra=1, batch=1) == 50
    assert ask(gate, clock, 40, extra=0, batch=16) < 6


def test_a_step_nobody_asked_in_settles_nothing() -> None:
    gate = DrafterGate(Clock())
    assert gate.end() is None


def followed(gate: FollowGate, steps: int, every: int | None) -> int:
    """Steps followed of so many, asked in every so-manieth of them."""
    count = 0
    for number in range(steps):
        gate.step(asked=every is not None and number % every == 0)
        count += gate.is_open
    return count


def test_a_drafter_that_is_asked_stays_followed() -> None:
    assert followed(FollowGate(), 5_000, every=4) == 5_000


def test_one_that_is_seldom_asked_follows_for_an_eighth_of_the_time() -> None:
    gate = FollowGate()
    followed(gate, 1024, every=None)
    assert followed(gate, 4 * 1024, every=30) == 4 * 128


def test_it_follows_when_it_is_asked_again() -> None:
    gate = FollowGate()
    followed(gate, 1024 + 500, every=None)
    assert not gate.is_open
    assert followed(gate, 16, every=1) >= 8


def draft(gate: BlockGate, clock: Clock, steps: int, *, expected: float, gained: int, block: float = 0.2) -> int:
    """Steps of one second, each with 2 tokens and those of a further block; returns how many blocks were drafted."""
    drafted = 0
    for _ in range(steps):
        gate.begin(1)
        further = gate.further(expected)
        if further:
            clock.now += block
            gate.drafted()
            drafted += 1
        clock.now += 1.0
        came = gained if further else 0
        gate.end()([came, 2 + came])
    return drafted


def test_a_block_that_pays_is_always_drafted() -> None:
    clock = Clock()
    assert draft(BlockGate(clock), clock, 200, expected=0.8, gained=1) == 200


def test_a_block_that_never_helps_is_drafted_now_and_then() -> None:
    clock = Clock()
    gate = BlockGate(clock)
    draft(gate, clock, 100, expected=0.8, gained=0)
    assert 1 <= draft(gate, clock, 400, expected=0.8, gained=0) <= 0.05 * 400


def test_a_block_pays_again_when_texts_change() -> None:
    clock = Clock()
    gate = BlockGate(clock)
    draft(gate, clock, 200, expected=0.8, gained=0)
    draft(gate, clock, 2_000, expected=0.8, gained=2)
    assert draft(gate, clock, 100, expected=0.8, gained=2) == 100


def test_a_small_gain_is_passed_over_where_a_large_one_is_not() -> None:
    clock = Clock()
    gate = BlockGate(clock)
    draft(gate, clock, 100, expected=1.0, gained=1)
    assert draft(gate, clock, 10, expected=0.9, gained=1) == 10
    assert draft(gate, clock, 20, expected=0.05, gained=0) <= 1


def test_larger_batches_are_tried_for_themselves() -> None:
    clock = Clock()
    gate = BlockGate(clock)
    draft(gate, clock, 300, expected=0.8, gained=0)
    gate.begin(8)
    assert gate.further(0.8)
