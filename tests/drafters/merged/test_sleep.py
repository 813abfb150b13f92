"""Who follows texts: drafters that are asked, and others for a while of each period."""

from drafters.merged.sleep import Sleep


def awake(sleep: Sleep, steps: int, every: int | None) -> int:
    """Steps awake of so many, asked in every so-manieth of them."""
    count = 0
    for number in range(steps):
        sleep.step(asked=every is not None and number % every == 0)
        count += sleep.is_awake
    return count


def test_a_drafter_that_is_asked_stays_awake() -> None:
    assert awake(Sleep(), 5_000, every=4) == 5_000


def test_one_that_is_seldom_asked_wakes_for_an_eighth_of_the_time() -> None:
    sleep = Sleep()
    awake(sleep, 1024, every=None)
    assert awake(sleep, 4 * 1024, every=30) == 4 * 128


def test_it_wakes_when_it_is_asked_again() -> None:
    sleep = Sleep()
    awake(sleep, 1024 + 500, every=None)
    assert not sleep.is_awake
    assert awake(sleep, 16, every=1) >= 8
