"""The engine's thread: requests come from anywhere, each step is delivered once, and an end is an end."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from service.engine.engine import Engine, EngineOutput
from service.engine.requests import SequenceOutput, Submission
from service.engine.thread import EngineThread
from tests.service.engine.harness import Generated, alone, greedy, request, sampled, tiny_engine
from tests.tiny_models import random_prompts

PATIENCE_SECONDS = 20.0


class Listener:
    """Everything a thread delivered and reported."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or tiny_engine()
        self.reports: list[EngineOutput] = []
        self.results: dict[tuple[str, int], Generated] = {}
        self.ended = threading.Semaphore(0)
        self.deliveries = 0
        self.thread = EngineThread(self.engine, {"observers": lambda report, load: self.reports.append(report)})
        self.thread.start(self.deliver)

    def deliver(self, outputs: list[SequenceOutput]) -> None:
        self.deliveries += 1
        for output in outputs:
            self.results.setdefault((output.request_id, output.index), Generated()).add(output)
            if output.finish_reason:
                self.ended.release()

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.ended.acquire(timeout=PATIENCE_SECONDS)


def eventually(holds: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.thread.stop()


def test_requests_from_several_threads_are_all_answered(listener: Listener) -> None:
    prompts = list(random_prompts(6, 20))
    clients = [
        threading.Thread(target=listener.thread.submit, args=[Submission([request(str(i), prompt, sampled(i, 12))])])
        for i, prompt in enumerate(prompts)
    ]
    for client in clients:
        client.start()
    listener.wait_for(6)
    for i, prompt in enumerate(prompts):
        assert listener.results[str(i), 0].tokens == alone(sampled(i, 12), prompt).tokens
    assert {report.finished[0].finish_reason for report in listener.reports if report.finished} == {"length"}


def test_an_aborted_request_hears_nothing_more(listener: Listener) -> None:
    listener.thread.submit(Submission([request("gone", [1, 2, 3], greedy(450))]))
    eventually(lambda: ("gone", 0) in listener.results)
    listener.thread.abort("gone")
    eventually(lambda: any(report.finished for report in listener.reports))
    heard = listener.results["gone", 0].num_outputs
    listener.thread.submit(Submission([request("next", [1, 2, 3], greedy(10))]))
    listener.wait_for(1)
    assert listener.results["gone", 0].last is None
    assert listener.results["gone", 0].num_outputs == heard
    assert listener.engine.slots.num_free == listener.engine.slots.capacity
    (finished,) = [stats for report in listener.reports for stats in report.finished if stats.finish_reason == "abort"]
    assert finished.output_tokens == len(listener.results["gone", 0].tokens)


def test_draining_finishes_what_runs_and_what_waits() -> None:
    listener = Listener()
    for name in ("a", "b", "c"):
        listener.thread.submit(Submission([request(name, [1, 2, 3], greedy(20))]))
    listener.thread.drain()
    listener.wait_for(3)
    eventually(lambda: not is_alive(listener))
    assert listener.thread.failure is None
    assert len(listener.results["c", 0].tokens) == 20


def is_alive(listener: Listener) -> bool:
    return any(thread.name == "engine" for thread in threading.enumerate())


def test_draining_when_idle_ends_at_once() -> None:
    listener = Listener()
    listener.thread.drain()
    eventually(lambda: not is_alive(listener))


def test_stopping_gives_up_what_runs_and_may_be_repeated() -> None:
    listener = Listener()
    listener.thread.submit(Submission([request("long", [1, 2, 3], greedy(480))]))
    eventually(lambda: bool(listener.results))
    listener.thread.stop()
    assert not is_alive(listener)
    assert listener.results["long", 0].last is None
    listener.thread.stop()


def test_the_engines_own_thread_may_stop_it() -> None:
    """A receiver of outputs can end everything from there."""
    listener = Listener()
    listener.ended.release = listener.thread.stop  # type: ignore[method-assign, assignment]
    listener.thread.submit(Submission([request("a", [1], greedy(2))]))
    eventually(lambda: not is_alive(listener))
    assert listener.thread.failure is None


def test_a_failing_step_ends_the_thread_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()

    def broken(*args: object, **how: object) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(listener.engine.target, "forward", broken)
    assert listener.thread.failure is None
    listener.thread.submit(Submission([request("a", [1], greedy(2))]))
    eventually(lambda: listener.thread.failure is not None and not is_alive(listener))
    assert str(listener.thread.failure) == "no more memory"
    assert listener.deliveries == 1  # an empty delivery, so that somebody looks
    assert listener.results == {}


def test_idle_costs_nothing(listener: Listener) -> None:
    listener.thread.submit(Submission([request("a", [1], greedy(2))]))
    listener.wait_for(1)
    eventually(lambda: listener.thread.num_running == 0)
    time.sleep(0.05)
    start = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - start < 0.1
