"""Which queries are recorded: all where something may be gained, few in a row else, and all again after a change."""

import random
from itertools import pairwise

import pytest

from adaptation.feedback import RecordingSampler


def sampler(share: float = 0.125) -> RecordingSampler:
    return RecordingSampler(share=share)


def served(asked: RecordingSampler, tau: float, count: int, rng: random.Random) -> list[bool]:
    """Queries of twenty verifies each, about so many tokens of which are accepted."""
    return [asked.observe([round(max(0.0, rng.gauss(tau, 0.7))) for _ in range(20)]) for _ in range(count)]


def test_every_query_is_recorded_until_it_may_rest() -> None:
    asked = sampler()
    assert all(asked.draws() for _ in range(100))
    asked.rest(True)
    asked.rest(False)
    assert all(asked.draws() for _ in range(100))


@pytest.mark.parametrize("share", [0.125, 0.25, 1.0])
def test_while_it_rests_a_share_is_recorded_in_a_row(share: float) -> None:
    asked = sampler(share)
    asked.rest(True)
    drawn = [asked.draws() for _ in range(640)]
    assert sum(drawn) == 640 * share
    turns = sum(one != other for one, other in pairwise(drawn))
    assert turns <= 2 * 640 * share / 8


def test_other_acceptance_wakes_it_for_a_while() -> None:
    asked, rng = sampler(), random.Random(0)
    assert not any(served(asked, 2.0, 60, rng))
    asked.rest(True)
    assert asked.resting
    noticed = served(asked, 0.8, 30, rng).index(True)
    assert noticed < 15
    asked = sampler()
    served(asked, 2.0, 60, rng)
    while not served(asked, 0.8, 1, rng)[0]:
        asked.rest(True)
        assert asked.resting
    for _ in range(30):
        asked.rest(True)
        assert not asked.resting
        assert asked.draws()
        served(asked, 0.8, 1, rng)
    served(asked, 0.8, 5, rng)
    asked.rest(True)
    assert asked.resting


def test_steps_without_drafts_say_nothing() -> None:
    assert not sampler().observe(())


def test_what_other_weights_do_is_not_other_traffic() -> None:
    for tells, expected in ((False, True), (True, False)):
        asked, rng = sampler(), random.Random(1)
        served(asked, 1.0, 200, rng)
        heard = []
        for tau in (1.09, 1.18, 1.27, 1.36):
            if tells:
                asked.weights_changed()
            heard += served(asked, tau, 10, rng)
        assert any(heard) is expected
