"""Idle time is used as far as its share goes, and no longer than that leads anywhere."""

import pytest

from adaptation.timing import IdleTime
from tests.adaptation.worlds import Clock


def idle(share: float = 0.25, max_failures: int = 2) -> tuple[IdleTime, Clock]:
    clock = Clock()
    return IdleTime(share=share, max_failures=max_failures, clock=clock), clock


@pytest.mark.parametrize(("share", "rest"), [(0.25, 30.0), (0.5, 10.0), (1.0, 0.0)])
def test_it_rests_so_long_that_its_share_is_kept(share: float, rest: float) -> None:
    time, clock = idle(share)
    assert time.may_begin(1)
    time.ended(10.0, published=True)
    if rest:
        clock.now += rest - 0.1
        assert not time.may_begin(1)
    clock.now += 0.2
    assert time.may_begin(1)


def test_without_a_share_nothing_begins() -> None:
    time, _ = idle(0.0)
    assert not time.may_begin(1)


def test_updates_in_vain_end_it_until_new_texts_come() -> None:
    time, _ = idle(1.0)
    for _ in range(2):
        assert time.may_begin(5)
        time.ended(1.0, published=False)
    assert not time.may_begin(5)
    assert time.may_begin(6)


def test_what_was_broken_off_was_not_in_vain() -> None:
    time, _ = idle(1.0)
    for _ in range(5):
        assert time.may_begin(5)
        time.ended(1.0, published=None)


def test_a_publish_begins_the_count_anew() -> None:
    time, _ = idle(1.0)
    assert time.may_begin(5)
    for published in (False, True, False):
        time.ended(1.0, published=published)
    assert time.may_begin(5)
