"""What is asked for more tokens is asked while the tokens it alone had right are worth its seconds."""

import pytest

from drafters.gating import AskGate


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """Steps of 1 second, and of what is asked 0.2 more for each that answers."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.gate = AskGate(self.clock)

    def step(self, extra: float, *, batch: int = 1, expected: tuple[float, ...] = (0.5,)) -> int:
        """One step in which `extra` of 2 tokens are had by what was asked; how often it was."""
        self.gate.begin(batch)
        asked = 0
        for tokens in expected:
            if not self.gate.ask(tokens):
                break
            self.clock.now += 0.2
            self.gate.answered()
            asked += 1
        self.clock.now += 1.0
        observe = self.gate.end()
        assert (observe is None) == (asked == 0)
        if observe is not None:
            observe((extra, 2.0))
        return asked

    def play(self, count: int, extra: float, *, expected: tuple[float, ...] = (0.5,)) -> list[int]:
        return [self.step(extra, expected=expected) for _ in range(count)]


def test_what_is_worth_its_seconds_goes_on() -> None:
    assert Steps().play(1_000, extra=0.5) == [1] * 1_000


def test_what_is_not_stops_and_is_tried_again() -> None:
    asked = Steps().play(5_000, extra=0.0)
    assert 0 < 0.2 * sum(asked[100:]) < 0.01 * 4_900


def test_it_comes_back_when_it_gains() -> None:
    steps = Steps()
    steps.play(500, extra=0.0)
    steps.play(1_500, extra=1.5)
    assert sum(steps.play(100, extra=1.5)) == 100


def test_ranges_of_expected_tokens_and_sizes_of_batches_are_judged_apart() -> None:
    steps = Steps()
    steps.play(200, extra=0.0, expected=(0.2,))
    assert steps.step(0.0, expected=(0.2,)) == 0
    assert steps.step(1.0, expected=(2.0,)) == 1
    assert steps.step(1.0, batch=64, expected=(0.2,)) == 1


def test_texts_are_followed_while_any_range_may_be_asked() -> None:
    steps, promised = Steps(), []
    for expected in (None, 0.2, 2.0):
        if expected is not None:
            steps.play(200, extra=0.0 if expected < 1 else 2.0, expected=(expected,))
        promised.append(steps.gate.promises)
    assert promised == [True, False, True]


def test_of_several_that_answer_each_has_the_tokens_it_was_expected_to_bring() -> None:
    """The first is expected to bring five times as much for the same seconds."""
    steps = Steps()
    asked = steps.play(3_000, extra=0.36, expected=(1.5, 0.3))
    assert sum(count == 1 for count in asked[500:]) > 0.8 * 2_500


def test_other_weights_are_asked_at_once() -> None:
    steps = Steps()
    steps.play(500, extra=0.0)
    assert steps.step(0.0) == 0
    steps.gate.renew()
    assert steps.step(0.0) == 1


@pytest.mark.parametrize("emitted", [0.0, 2.0])
def test_a_clock_that_stands_still_says_nothing(emitted: float) -> None:
    gate = AskGate(lambda: 0.0)
    for _ in range(100):
        gate.begin(1)
        assert gate.ask(0.5)
        gate.answered()
        observe = gate.end()
        assert observe is not None
        observe((0.0, emitted))
