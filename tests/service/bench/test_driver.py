"""The drive of an engine: as many requests in flight as there are clients, and pauses that do not count."""

from itertools import count

from service.assembly import Assembly
from service.bench.driver import ClosedLoop, Drive
from service.bench.experiment import Measure, plain_engine, requests_from
from tests.service.bench.parts import varied_prompts


def test_a_closed_loop_keeps_as_many_in_flight() -> None:
    loop = ClosedLoop(3)
    assert [loop.due(0.0, finished) for finished in (0, 1, 5)] == [3, 4, 8]
    assert loop.since(4, 1.5) == 1.5


def test_requests_are_served_in_a_closed_loop(assembly: Assembly) -> None:
    engine = plain_engine(assembly)
    requests = requests_from(varied_prompts()[:5], 0, Measure(0.0, 6, 5, 0))
    in_flight: list[int] = []
    times = count(0.0, 0.5)

    def clock() -> float:
        in_flight.append(engine.load.num_running + engine.load.num_waiting)
        return next(times)

    driven = Drive(engine, requests, ClosedLoop(2), clock=clock)
    driven.go_on()
    run = driven.result()
    assert max(in_flight) == 2
    assert [len(answer.token_ids) for answer in run.answers] == [6] * 5
    assert all(len(answer.gaps_seconds) == 5 for answer in run.answers)
    assert all(answer.first_token_seconds > 0 for answer in run.answers)
    assert run.seconds > sum(run.answers[0].gaps_seconds) > 0
    assert engine.idle


def test_time_stands_still_between_slices(assembly: Assembly) -> None:
    engine = plain_engine(assembly)
    requests = requests_from(varied_prompts()[:3], 0, Measure(0.0, 6, 3, 0))
    now = [0.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    driven = Drive(engine, requests, ClosedLoop(1), clock=clock)
    slices = 0
    while not driven.is_over:
        driven.go_on(4.0)
        slices += 1
        now[0] += 1_000.0
    run = driven.result()
    assert slices > 3
    assert 18 <= run.seconds <= 6.0 * slices
    assert max(gap for answer in run.answers for gap in answer.gaps_seconds) < 4.0
    assert [len(answer.token_ids) for answer in run.answers] == [6] * 3
