"""What is asked for more tokens is asked while the tokens it alone had right are worth the seconds that steps take
longer with it, and loses no more than the ledger allows."""

from collections.abc import Iterable

import pytest

from drafters.asking import AskGate
from drafters.decision import CAP_STEPS, RegretLedger
from drafters.protocol import StepTimes


class Steps:
    """Steps of 1 second, and of what is asked 0.2 more for each that answers."""

    def __init__(self) -> None:
        self.ledger = RegretLedger()
        self.gate = AskGate("network", self.ledger)

    def step(
        self,
        extra: float,
        *,
        batch: int = 1,
        warm: bool = False,
        expected: tuple[float, ...] = (0.5,),
        late: bool = False,
    ) -> int:
        """One step in which `extra` of 2 tokens are had by what was asked; how often it was. `late`: what came of it is
        read when its times are known."""
        self.gate.begin(batch, warm=warm)
        asked = 0
        for tokens in expected:
            if not self.gate.ask(tokens):
                break
            asked += 1
        observe = self.gate.end()
        assert (observe is None) == (asked == 0)
        counts = extra, 2.0
        if observe is not None and not late:
            observe(counts)
        seconds = 1.0 + 0.2 * asked
        self.gate.timed(StepTimes(seconds, 0.0, reads_prompts=False))
        if observe is not None and late:
            observe(counts)
        self.ledger.accrue(seconds)
        return asked

    def play(self, count: int, extra: float, *, expected: tuple[float, ...] = (0.5,)) -> list[int]:
        return [self.step(extra, expected=expected) for _ in range(count)]


def share(asked: Iterable[int]) -> float:
    taken = list(asked)
    return sum(taken) / len(taken)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_worth_its_seconds_goes_on(late: bool) -> None:
    steps = Steps()
    asked = [steps.step(0.5, late=late) for _ in range(1_000)]
    assert share(asked) > 0.9, "but for steps to compare with, for its gain of 0.1 step is hardly sure"


def test_what_is_not_stops_and_is_tried_again() -> None:
    asked = Steps().play(5_000, extra=0.0)
    assert 0 < 0.2 * sum(asked[100:]) < 0.01 * 4_900


def test_what_loses_too_little_to_be_sure_of_loses_no_more_than_the_ledger_allows() -> None:
    """It takes 0.2 of a step longer and brings 0.17 of one: its posterior alone would go on for ever."""
    steps, count = Steps(), 20_000
    asked = steps.play(count, extra=0.17 * 2 / 1.2)
    lost = 0.03 * sum(asked)
    assert lost < CAP_STEPS + 0.01 * 1.2 * count + 1
    assert share(asked[-5_000:]) < 0.5
    assert steps.ledger.balances["network greedy"] < CAP_STEPS / 2


def test_a_drafter_without_times_is_not_refused() -> None:
    gate = AskGate("network", RegretLedger())
    for _ in range(100):
        gate.begin(1, warm=False)
        assert gate.ask(0.5)
        observe = gate.end()
        assert observe is not None
        observe((0.0, 2.0))


def test_it_comes_back_when_it_gains() -> None:
    steps = Steps()
    steps.play(500, extra=0.0)
    steps.play(1_500, extra=1.5)
    assert share(steps.play(100, extra=1.5)) > 0.9


def test_ranges_of_expected_tokens_and_sizes_of_batches_are_judged_apart() -> None:
    steps = Steps()
    steps.play(200, extra=0.0, expected=(0.2,))
    assert steps.step(0.0, expected=(0.2,)) == 0
    assert sum(steps.play(2, extra=1.0, expected=(2.0,))) == 1, "the other is to compare with"
    assert sum(steps.step(1.0, batch=64, expected=(0.2,)) for _ in range(2)) == 1


def test_texts_are_followed_while_any_range_may_be_asked() -> None:
    steps, promised = Steps(), []
    for expected in (None, 0.2, 2.0):
        if expected is not None:
            steps.play(200, extra=0.0 if expected < 1 else 2.0, expected=(expected,))
        promised.append(steps.gate.may_gain)
    assert promised == [True, False, True]


def test_drawn_texts_that_lose_do_not_speak_for_others() -> None:
    """Of texts in turn those at temperature 0 gain by it, and those at 1 lose: each is asked for as if alone."""
    steps, asked = Steps(), dict[bool, list[int]]()
    for _ in range(20):
        for warm in (False, True):
            asked.setdefault(warm, []).extend(steps.step(0.0 if warm else 1.0, warm=warm) for _ in range(50))
    assert share(asked[False][100:]) > 0.95
    assert share(asked[True][100:]) < 0.1
    assert not steps.gate.may_gain
    assert steps.gate.can_afford_sequence(warm=False)
    assert not steps.gate.can_afford_sequence(warm=True)


def test_prompts_that_are_taken_in_are_charged_and_texts_begin_where_enough_is_left() -> None:
    steps = Steps()
    steps.play(4, extra=0.3)
    assert steps.gate.can_afford_sequence(warm=False)
    for followed in (False, True):
        before = steps.ledger.balances["network greedy"]
        steps.gate.timed(StepTimes(50.0, 40.0, reads_prompts=True), followed=followed)
        assert before - steps.ledger.balances["network greedy"] == 40.0 * followed
    assert steps.gate.may_gain
    assert not steps.gate.can_afford_sequence(warm=False)


def test_of_several_that_answer_each_has_the_tokens_it_was_expected_to_bring() -> None:
    """The first is expected to bring five times as much for the same seconds."""
    steps = Steps()
    asked = steps.play(3_000, extra=0.36, expected=(1.5, 0.3))
    assert sum(count == 1 for count in asked[500:]) > 0.8 * 2_500


def test_other_weights_are_asked_at_once() -> None:
    steps = Steps()
    steps.play(500, extra=0.0)
    assert steps.step(0.0) == 0
    steps.gate.on_weights_changed()
    assert steps.step(0.0) == 1


def test_times_belong_to_the_step_that_took_them_also_when_another_has_ended_since() -> None:
    """As `Steps`, each step timed after the next one has ended."""
    steps, waiting, asked = Steps(), list[float](), 0
    gate = steps.gate
    for number in range(600):
        gate.begin(1, warm=False)
        answers = gate.ask(0.5)
        asked += answers
        observe = gate.end()
        if observe is not None:
            observe((0.05, 2.0))  # of two tokens, worth 0.03 of the 0.2 seconds
        waiting.append(1.0 + 0.2 * answers)
        if number:
            gate.timed(StepTimes(waiting.pop(0), 0.0, reads_prompts=False, is_passed=True))
        steps.ledger.accrue(1.0)
    alone = Steps()
    assert abs(asked - sum(alone.play(600, 0.05))) < 60, "neither more nor less than step by step"
    assert asked < 200
