"""The side thread: never in the engine's way, within its share of time, and not to be killed by anything."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from adaptation.worker import Inbox, Worker
from drafters.feedback import QueryFeedback
from tests.adaptation.samples import feedback
from tests.tuned import settled

FEEDBACK = feedback(0)


@dataclass
class Scripted:
    """A loop that does what it is asked at each stage."""

    on_hear: Callable[[], None] = lambda: None
    on_work: Callable[[], object] = lambda: False
    on_recover: Callable[[], None] = lambda: None
    on_save: Callable[[], None] = lambda: None
    reported: list[str] = field(default_factory=list)
    waits: bool = False

    def observe(self, feedback: QueryFeedback) -> None:
        self.reported.append("observe")
        self.on_hear()

    def work(self) -> bool:
        return bool(self.on_work())

    def abandon(self) -> None:
        self.reported.append("abandon")

    def recover(self, error: str) -> None:
        self.reported.append(f"recover {error}")
        self.on_recover()

    def forget(self, scope: str | None) -> None:
        self.reported.append(f"forget {scope}")

    def save(self, *, training: bool) -> None:
        self.reported.append("save")
        self.on_save()


def failing(stage: str, action: Callable[[], None]) -> Scripted:
    """Does this once, at a stage."""
    act = once(action)
    match stage:
        case "observe":
            return Scripted(on_hear=act)
        case "update":
            return Scripted(on_work=act)
        case "recover":
            return Scripted(on_hear=once(broken), on_recover=act)
    return Scripted()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def once(action: Callable[[], None]) -> Callable[[], None]:
    """Does it the first time only."""
    left: Iterator[Callable[[], None]] = iter([action])
    return lambda: next(left, lambda: None)()


def broken() -> None:
    raise RuntimeError("broken on purpose")


def killed() -> None:
    raise SystemExit


@pytest.fixture
def made() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def make(loop: Scripted, *, max_waiting: int = 64, trains: bool = True) -> Worker:
        workers.append(Worker(loop, max_waiting=max_waiting))
        workers[-1].trains = trains
        workers[-1].start()
        return workers[-1]

    yield make
    assert all(worker.stop() for worker in workers)


Made = Callable[..., Worker]


def test_every_query_is_heard_and_the_end_is_saved(made: Made) -> None:
    loop = Scripted()
    worker = made(loop)
    for _ in range(20):
        worker.offer(FEEDBACK)
    wait_until(lambda: loop.reported.count("observe") == 20)
    assert worker.stop()
    assert [reported for reported in loop.reported if reported != "abandon"] == ["observe"] * 20 + ["save"]
    assert worker.inbox.num_dropped == 0


def test_the_engine_never_waits_and_the_oldest_are_dropped(made: Made) -> None:
    going = threading.Event()
    loop = Scripted(on_hear=lambda: wait_until(going.is_set))
    worker = made(loop, max_waiting=5)
    worker.offer(FEEDBACK)
    wait_until(lambda: loop.reported == ["observe"])
    began = time.monotonic()
    for _ in range(1000):
        worker.offer(FEEDBACK)
    assert time.monotonic() - began < 1.0
    assert worker.inbox.num_dropped == 995
    going.set()
    wait_until(lambda: loop.reported == ["observe"] * 6)


@pytest.mark.parametrize("stage", ["observe", "update", "recover", "command"])
def test_an_exception_at_any_stage_is_counted_and_survived(made: Made, stage: str) -> None:
    loop = failing(stage, broken)
    worker = made(loop)
    if stage == "command":
        with pytest.raises(RuntimeError, match="on purpose"):
            worker.ask(broken).result(10)
    worker.offer(FEEDBACK)
    wait_until(lambda: worker.failures[stage] == 1)  # type: ignore[index]
    worker.offer(FEEDBACK)
    wait_until(lambda: loop.reported.count("observe") == 2)
    failed_in = "observe" if stage == "recover" else stage
    assert f"recover {failed_in}: RuntimeError: broken on purpose" in loop.reported
    assert (worker.alive, worker.num_restarts) == (True, 0)


def test_a_save_that_breaks_does_not_keep_the_thread(made: Made) -> None:
    worker = made(Scripted(on_save=broken))
    assert worker.stop()
    assert worker.failures["save"] == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stage", ["observe", "update", "recover"])
def test_a_killed_thread_is_replaced_and_goes_on_from_what_is_served(made: Made, stage: str) -> None:
    loop = failing(stage, killed)
    worker = made(loop)
    worker.offer(FEEDBACK)
    wait_until(lambda: not worker.alive)
    worker.offer(FEEDBACK)
    wait_until(lambda: worker.alive and "recover thread_died" in loop.reported)
    worker.offer(FEEDBACK)
    wait_until(lambda: loop.reported.count("observe") >= 2)
    assert worker.num_restarts == 1


def test_a_command_after_the_end_is_cancelled(made: Made) -> None:
    worker = made(Scripted())
    assert worker.stop()
    assert worker.ask(lambda: 1).cancelled()


def test_commands_and_queries_come_before_the_next_piece_of_an_update(made: Made) -> None:
    loop, order, pieces = Scripted(), list[str](), iter(range(3))
    begun, going = threading.Event(), threading.Event()

    def piece() -> bool:
        if next(pieces, None) is None:
            return False
        begun.set()
        wait_until(going.is_set)
        order.append("piece")
        return True

    loop.on_work, loop.on_hear = piece, lambda: order.append("query")
    worker = made(loop)
    assert begun.wait(10)
    worker.offer(FEEDBACK)
    asked = worker.ask(lambda: order.append("command"))
    going.set()
    asked.result(10)
    assert settled(worker, 10)
    assert order == ["piece", "command", "query", "piece", "piece"]


def test_a_follower_abandons_its_update_and_begins_none(made: Made) -> None:
    loop, pieces = Scripted(), list[int]()

    def piece() -> bool:
        pieces.append(1)
        return len(pieces) < 3

    loop.on_work = piece
    worker = made(loop, trains=False)
    worker.offer(FEEDBACK)
    assert settled(worker, 10)
    assert (pieces, set(loop.reported)) == ([], {"observe", "abandon"})
    worker.trains = True
    wait_until(lambda: len(pieces) >= 3)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no niceness of their own")
def test_the_thread_gives_way_and_no_other_does() -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    worker = Worker(Scripted(), max_waiting=4, niceness=3)
    worker.start()
    niceness = worker.ask(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(10)
    assert niceness == min(19, ours + 3)
    assert os.getpriority(os.PRIO_PROCESS, 0) == ours
    assert worker.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_command_that_kills_the_thread_is_an_ordinary_error_for_its_caller(made: Made) -> None:
    worker = made(Scripted())
    with pytest.raises(RuntimeError, match="died"):
        worker.ask(killed).result(10)
    wait_until(lambda: not worker.alive)
    assert worker.ask(lambda: 1).result(10) == 1
    assert worker.num_restarts == 1


def test_a_query_that_comes_while_others_are_forgotten_is_heard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox(9)

    def wait(timeout: float) -> None:
        """A query ends, and another scope is forgotten, before the thread has woken."""
        inbox.put_query(feedback(1))
        inbox.forget("another")

    monkeypatch.setattr(inbox._ready, "wait", wait)
    assert inbox.take(0.0) is not None
    assert not inbox.queries


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_replaced_once(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators ask from their threads while the engine offers from its own."""
    worker = made(Scripted(on_hear=once(killed)))
    worker.offer(FEEDBACK)
    wait_until(lambda: not worker.alive)
    usual, starts = worker.start, list[int]()

    def slow() -> None:
        starts.append(1)
        time.sleep(0.05)
        usual()

    monkeypatch.setattr(worker, "start", slow)
    asking = [threading.Thread(target=lambda: worker.ask(lambda: 1).result(10)) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert (len(starts), worker.num_restarts) == (1, 1)
