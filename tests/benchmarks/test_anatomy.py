"""The anatomy of steps: each part is a function that there is, and the parts together are the step."""

from benchmarks.anatomy import CALLS, Stopwatch, watched
from service.bench.driver import generate
from tests.service.engine.harness import request, tiny_engine


def test_the_parts_of_a_step_are_the_whole_step() -> None:
    with watched() as watch:
        engine = tiny_engine(drafter="memory")
        taken = list[dict[str, float]]()
        run = generate(engine, [request("one", range(5))], before_step=lambda step: taken.append(watch.take()))
        parts = [*taken[1:], watch.take()]
    assert {part for step in parts for part in step} <= set(CALLS)
    named, whole = sum(map(sum, (step.values() for step in parts))), sum(step.seconds for step in run.steps)
    assert 0.5 * whole < named < whole, "what is outside is the driver's"


def test_a_call_s_seconds_are_its_own() -> None:
    now, watch = [0.0], Stopwatch(lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    inner = watch.timed("inner", passes)

    def both() -> None:
        passes(1.0)
        inner(2.0)

    watch.timed("outer", both)()
    assert watch.take() == {"inner": 2.0, "outer": 1.0}
    assert watch.take() == {}
