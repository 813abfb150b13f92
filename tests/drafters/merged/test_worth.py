"""When a costly drafter is asked, by its own record."""

from drafters.merged.worth import Worth


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def play(
    worth: Worth, clock: Clock, steps: int, *, extra: int, promised: float = 0.0, cost: float = 0.1, batch: int = 1
) -> int:
    """So many steps of one second, each emitting 1 + extra tokens; returns how often the drafter was asked."""
    asked = 0
    for _ in range(steps):
        if worth.ask(promised, batch):
            asked += 1
            clock.now += cost
            worth.answered()
            clock.now += 1.0
            observe = worth.end()
            assert observe is not None
            observe([extra, 1 + extra])
    return asked


def test_a_drafter_that_pays_is_always_asked() -> None:
    clock = Clock()
    assert play(Worth(clock), clock, 200, extra=1) == 200


def test_a_drafter_that_never_helps_is_asked_now_and_then() -> None:
    clock = Clock()
    worth = Worth(clock)
    play(worth, clock, 50, extra=0)
    assert 0 < play(worth, clock, 1_000, extra=0) * 0.1 <= 0.011 * 1_000
    assert worth.num_passed_over > 800


def test_it_comes_back_when_it_helps_again() -> None:
    clock = Clock()
    worth = Worth(clock)
    play(worth, clock, 100, extra=0)
    play(worth, clock, 300, extra=2)
    assert play(worth, clock, 100, extra=2) == 100


def test_books_are_kept_by_what_the_others_promise() -> None:
    clock = Clock()
    worth = Worth(clock)
    play(worth, clock, 100, extra=0, promised=5.0)
    assert play(worth, clock, 50, extra=1, promised=0.0) == 50
    assert play(worth, clock, 40, extra=0, promised=5.0) < 6


def test_books_are_kept_by_load() -> None:
    clock = Clock()
    worth = Worth(clock)
    play(worth, clock, 100, extra=0, batch=16)
    assert play(worth, clock, 50, extra=1, batch=1) == 50
    assert play(worth, clock, 40, extra=0, batch=16) < 6


def test_a_step_nobody_asked_in_settles_nothing() -> None:
    worth = Worth(Clock())
    assert worth.end() is None
    assert worth.num_asked == 0
