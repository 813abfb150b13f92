"""The forecast of how many slots a sequence will still need."""

import pytest

from service.engine.admission import Forecast
from service.engine.sequence import Sequence
from tests.service.engine.test_scheduler import sequence_of


def written(count: int, *, prompt: int = 10, max_tokens: int = 400) -> Sequence:
    sequence = sequence_of(prompt, max_tokens=max_tokens)
    sequence.tokens += [1] * count
    return sequence


def test_nobody_is_expected_to_write_more_than_it_may() -> None:
    assert Forecast().tokens_to_write(written(0, max_tokens=5)) == 5
    assert Forecast().tokens_to_write(written(300, max_tokens=302)) == 2


def test_what_is_still_to_be_read_is_claimed_too() -> None:
    forecast, sequence = Forecast(), written(0, prompt=30, max_tokens=5)
    assert forecast.claim(sequence) == 35
    sequence.num_computed = 20
    assert forecast.claim(sequence) == 15


@pytest.mark.parametrize("length", [8, 200])
def test_it_learns_how_long_answers_are(length: int) -> None:
    forecast = Forecast()
    for _ in range(200):
        forecast.ended(written(length))
    assert forecast.tokens_to_write(written(0)) == length
    assert forecast.tokens_to_write(written(length // 2)) == length - length // 2
    assert forecast.tokens_to_write(written(length * 2, max_tokens=800)) == length // 4, (
        "who outlasts the others goes on"
    )
