"""A further block is drafted when what it promises is worth more seconds than it takes."""

from drafters.specblock.stopping import Stopping


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def play(stopping: Stopping, clock: Clock, steps: int, *, promise: float, gained: int, block: float = 0.2) -> int:
    """Steps of one second, each with 2 tokens and those of a further block; returns how many blocks were drafted."""
    drafted = 0
    for _ in range(steps):
        stopping.begin(1)
        further = stopping.further(promise)
        if further:
            clock.now += block
            stopping.drafted()
            drafted += 1
        clock.now += 1.0
        came = gained if further else 0
        stopping.end()([came, 2 + came])
    return drafted


def test_a_block_that_pays_is_always_drafted() -> None:
    clock = Clock()
    assert play(Stopping(clock), clock, 200, promise=0.8, gained=1) == 200


def test_a_block_that_never_helps_is_drafted_now_and_then() -> None:
    clock = Clock()
    stopping = Stopping(clock)
    play(stopping, clock, 100, promise=0.8, gained=0)
    assert 1 <= play(stopping, clock, 400, promise=0.8, gained=0) <= 0.05 * 400


def test_it_pays_again_when_texts_change() -> None:
    clock = Clock()
    stopping = Stopping(clock)
    play(stopping, clock, 200, promise=0.8, gained=0)
    play(stopping, clock, 2_000, promise=0.8, gained=2)
    assert play(stopping, clock, 100, promise=0.8, gained=2) == 100


def test_a_small_promise_is_passed_over_where_a_large_one_is_not() -> None:
    clock = Clock()
    stopping = Stopping(clock)
    play(stopping, clock, 100, promise=1.0, gained=1)
    assert play(stopping, clock, 10, promise=0.9, gained=1) == 10
    assert play(stopping, clock, 20, promise=0.05, gained=0) <= 1


def test_larger_batches_are_tried_for_themselves() -> None:
    clock = Clock()
    stopping = Stopping(clock)
    play(stopping, clock, 300, promise=0.8, gained=0)
    stopping.begin(8)
    assert stopping.further(0.8)
