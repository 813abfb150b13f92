"""Prompts beside the decoding of other clients, in imagined time: reading takes its share, and no step becomes long."""

from dataclasses import replace

import pytest

from tests.service.engine.test_scheduler import Room, request_of

PLAIN, ROW = 30.0, 2.0  # milliseconds of a step without prompts, and of a row of a prompt


class Clock:
    """A server in imagined time, whose rows become dearer with the context that they read."""

    def __init__(self, *, per_token: float = 0.0) -> None:
        self.now = 0.0
        self.room = Room(num_slots=40_000, lines=32, chunk=256, now=lambda: self.now)
        self._per_token = per_token
        self.steps: list[float] = []

    def run(self, count: int) -> None:
        for _ in range(count):
            read = [item for item in self.room.step().items if not item.decodes]
            self.steps.append(PLAIN + sum(item.num_rows * (ROW + self._per_token * item.start) for item in read))
            self.now += self.steps[-1]


def beside(client: str) -> Clock:
    """A server in which one sequence of this client decodes."""
    clock = Clock()
    clock.room.ask(request_of(4, client=client, max_tokens=30_000))
    clock.run(10)
    return clock


@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize("per_token", [0.0, 0.01])
def test_reading_takes_a_clients_share_of_the_time(others: int, per_token: float) -> None:
    clock = Clock(per_token=per_token)
    for number in range(others):
        clock.room.ask(replace(request_of(4, client=f"honest {number}", max_tokens=30_000), n=4))
    clock.run(30)
    prompts = [clock.room.ask(request_of(1900, client="greedy", max_tokens=1)) for _ in range(4)]
    clock.run(80)  # the first of them takes too long, and is paid back
    begin, before = len(clock.steps), clock.now
    clock.run(100)
    assert any(prompt.is_prefilling for prompt in prompts)
    decoding = 100 * PLAIN
    assert 0.75 * decoding / others < clock.now - before - decoding < 1.1 * decoding / others
    assert max(clock.steps[begin:]) < PLAIN * (1 + 1.3 / others) + ROW


def test_what_a_long_step_took_too_much_is_paid_back() -> None:
    clock = beside("honest")
    prompt = clock.room.ask(request_of(1900, client="greedy", max_tokens=1))
    clock.run(2)
    assert clock.steps[-2:] == [PLAIN + 256 * ROW, PLAIN]
    clock.run(int(256 * ROW / PLAIN) - 2)
    assert set(clock.steps[11:]) == {PLAIN}
    clock.run(2)
    assert clock.steps[-1] > PLAIN
    assert prompt.num_computed < 256 + 128, "and then in smaller steps"


def test_a_clients_own_prompts_are_read_at_once() -> None:
    clock = beside("one")
    clock.room.ask(request_of(1900, client="one", max_tokens=1))
    clock.run(8)
    assert clock.steps[11:17] == [PLAIN + 256 * ROW] * 6


def test_a_short_prompt_of_one_that_owes_nothing_is_read_beside_one_that_owes() -> None:
    clock = beside("honest")
    long = clock.room.ask(request_of(1900, client="greedy", max_tokens=1))
    clock.run(2)
    short = clock.room.ask(request_of(12, client="third", max_tokens=5))
    clock.run(2)
    assert not short.is_prefilling
    assert long.num_computed == 256


def test_many_prompts_of_a_client_have_no_more_time_than_one() -> None:
    """Each ends in the step after the one that reads it, so that several are read in a step."""
    clock = Clock()
    clock.room.ask(replace(request_of(4, client="honest", max_tokens=30_000), n=4))
    clock.run(10)
    for _ in range(100):
        clock.room.ask(replace(request_of(3, client="greedy", max_tokens=1), n=8))
    clock.run(60)
    before = clock.now
    clock.run(40)
    assert clock.now - before < 2.2 * 40 * PLAIN
