"""Length and learning rate of a run."""

import pytest

from drafters.training.errors import TrainingError
from drafters.training.schedule import Length, rate_factor


def test_the_end_that_comes_first_counts() -> None:
    assert Length(steps=10).fraction(5, 1e9) == 0.5
    assert Length(seconds=10.0).fraction(10**9, 5.0) == 0.5
    assert Length(steps=10, seconds=100.0).fraction(2, 90.0) == 0.9
    assert Length(steps=10).fraction(11, 0.0) == 1.0


def test_a_length_must_be_said() -> None:
    with pytest.raises(TrainingError, match="minutes, steps or both"):
        Length()


def test_the_rate_rises_then_falls_to_its_rest() -> None:
    rising = [rate_factor(step, 0.0, warm_up_steps=4, least=0.1) for step in range(5)]
    assert rising == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rate_factor(100, 0.5, warm_up_steps=4, least=0.1) == pytest.approx(0.55)
    assert rate_factor(100, 1.0, warm_up_steps=4, least=0.1) == pytest.approx(0.1)
