"""A process of its own trains to the bit as a thread would, and its death costs one update."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from torch import Tensor

from adaptation.config import AdaptationConfig
from adaptation.evaluator import replay_of
from adaptation.process import TrainingProcess
from adaptation.records import TrainingLost
from adaptation.samples import example_of
from adaptation.timing import completed
from adaptation.worker import Worker
from drafters.network.checkpoint import weights_of
from tests.adaptation.drafts import same
from tests.adaptation.samples import EMBED, Bench, bench, beside_memory, drafter, feedback, full_bench, samples
from tests.service.engine.test_thread import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One learner for the tests that need a process, which run in order: starting one takes seconds of imports."""
    made = full_bench(tmp_path_factory.mktemp("process"), train_in="process")
    yield made
    process_of(made).close()


def process_of(tried: Bench) -> TrainingProcess:
    assert tried.learner.training.process is not None
    return tried.learner.training.process


def learn(tried: Bench, count: int = 16, *, updates: bool = True) -> None:
    """From texts of three tokens."""
    tokens = drafter().d2t[5:8].tolist()
    for seed in range(count):
        tried.learner.observe(feedback(seed, token=tokens[seed % 3], version=tried.weights.version))
        if updates:
            tried.update()
        tried.weights.between_steps()
    tried.publisher.monitor.unscored.clear()


def copied(tried: Bench) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tried.trainer.tensors().items()}


def test_it_trains_judges_and_publishes_as_a_thread_does(tried: Bench, tmp_path: Path) -> None:
    alone = full_bench(tmp_path / "thread", train_in="thread")
    for each in (tried, alone):
        learn(each)
    assert alone.learner.training.process is None
    assert "published" in tried.kinds()
    assert tried.kinds() == alone.kinds()
    assert same(weights_of(tried.serving), weights_of(alone.serving))
    assert same(weights_of(tried.weights.training), weights_of(alone.weights.training))
    assert same(tried.trainer.tensors(), alone.learner.training.trainer.tensors())
    assert process_of(tried).num_started == 1
    assert tried.time.seconds > 0


def test_it_replays_a_text_beside_the_memory_as_this_process_does(tried: Bench) -> None:
    example, replica = example_of(beside_memory(feedback(1, token=7))), tried.weights.candidate()
    assert example is not None
    tau = completed(process_of(tried).replay(replica, example))
    assert tau == replay_of(EMBED)(replica, example) > 1.0


def test_an_update_in_it_can_be_abandoned_between_steps(tried: Bench) -> None:
    process = process_of(tried)
    before, pieces = copied(tried), process.update("full", samples(4))
    for _ in range(3):
        next(pieces)
        while process.is_asked:  # a piece may take several looks
            next(pieces)
    assert not same(before, tried.trainer.tensors()), "two steps were taken"
    pieces.close()
    assert same(before, tried.trainer.tensors())


def test_a_request_stops_it_amid_a_piece_until_the_next_pause(tried: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that undoes the update does not wait for that pause."""
    process, time = process_of(tried), tried.time
    before, pieces = copied(tried), process.update("full", samples(4))
    time.pauses.add(1.0, idle_seconds=1.0)
    monkeypatch.setattr("adaptation.process._POLL_SECONDS", 0.0)
    next(pieces)
    time.stepping()
    assert process.brake.is_stopped
    stopped, cpu_seconds = process.pid, cpu_seconds_of(process)
    for _ in range(2):
        next(pieces)
        assert not time.may_compute
    assert (process.pid, cpu_seconds_of(process)) == (stopped, cpu_seconds), "neither given up nor computing"
    pieces.close()
    assert same(before, tried.trainer.tensors()), "it was continued"
    time.skip_pause()
    assert completed(process.update("head", samples(4))).applied


def cpu_seconds_of(process: TrainingProcess) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def test_an_exception_in_it_is_raised_here_and_changes_nothing(tried: Bench) -> None:
    process, broken, before = process_of(tried), samples(2), copied(tried)
    draft_labels = broken[0].draft_labels
    broken[0] = replace(broken[0], draft_labels=replace(draft_labels, states=draft_labels.states[:, :7]))
    with pytest.raises(RuntimeError, match="Traceback"):
        completed(process.update("head", broken))
    assert same(before, tried.trainer.tensors())
    assert completed(process.update("head", samples(4))).applied


def test_an_interrupt_of_the_terminal_does_not_end_it(tried: Bench) -> None:
    process = process_of(tried)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    assert completed(process.update("head", samples(4))).applied
    assert process.num_started == 1


def test_a_thread_that_dies_while_it_waits_leaves_no_update_running(
    tried: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = process_of(tried)
    with monkeypatch.context() as patch:
        patch.setattr("adaptation.process._received", interrupted)
        with pytest.raises(KeyboardInterrupt):
            completed(process.update("full", samples(4)))
    assert process.is_asked
    tried.learner.recover("thread_died")
    assert process.pid is None
    assert same(weights_of(tried.weights.training), weights_of(tried.serving))


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("steps", [0, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (1, 2))])
def test_a_process_killed_amid_an_update_costs_that_update(tried: Bench, steps: int) -> None:
    process, served = process_of(tried), {name: value.clone() for name, value in weights_of(tried.serving).items()}
    learn(tried, updates=False)
    for _ in range(1 + steps):
        assert tried.learner.work()
    kill(process)
    with pytest.raises(TrainingLost, match="died"):
        tried.update()
    tried.learner.recover("killed")
    assert same(weights_of(tried.weights.training), served)
    started = process.num_started
    assert completed(process.update("full", samples(4))).applied
    assert process.num_started == started + 1


def test_an_update_whose_process_was_killed_can_be_abandoned(tried: Bench) -> None:
    learn(tried, updates=False)
    for _ in range(3):
        assert tried.learner.work()
    kill(process_of(tried))
    tried.learner.pause()
    assert same(weights_of(tried.weights.training), weights_of(tried.serving))
    tried.learner.resume()


def kill(process: TrainingProcess) -> None:
    assert process.pid is not None
    assert process.brake.process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.brake.process.wait()


@pytest.mark.slow
def test_one_that_died_between_two_updates_is_replaced(tried: Bench) -> None:
    process = process_of(tried)
    completed(process.update("head", samples(4)))
    first = process.pid
    kill(process)
    assert completed(process.update("head", samples(4))).applied
    assert process.pid != first


def test_one_that_stands_still_holds_up_no_command_and_is_replaced(
    tried: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, process = tried.learner, process_of(tried)
    completed(process.update("head", samples(4)))  # so that the process is there, and what it takes is known
    learn(tried, updates=False)
    monkeypatch.setattr("adaptation.process._ENDING_SECONDS", 1.0)
    assert process.pid is not None
    first, learnt = process.pid, learner.training.num_updates.total()
    os.kill(first, signal.SIGSTOP)
    worker = Worker(learner, max_waiting=256)
    worker.start()
    try:
        eventually(lambda: process.is_asked)
        assert worker.ask(lambda: learner.status(worker)).result(10).updates.get("head", 0) >= 0
        assert process.pid == first, "the command came before the process was given up"
        eventually(lambda: any("TrainingLost" in event.reason for event in tried.events))
        assert worker.failures["update"] == 1
        for seed in range(16):
            worker.offer(feedback(100 + seed, token=int(drafter().d2t[5 + seed % 3]), version=tried.weights.version))
        eventually(lambda: learner.training.num_updates.total() > learnt, seconds=120.0)
        assert process.pid not in (None, first)
    finally:
        assert worker.stop(60.0)


def test_one_that_is_stopped_ends_with_the_thread_that_started_it(tried: Bench) -> None:
    process = process_of(tried)
    process.close()
    pieces = process.update("full", samples(4))

    def leave() -> None:
        for _ in range(3):  # begins, and computes
            next(pieces)
        process.brake.may_stop = True
        process.brake.stop()

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert process.brake.process is not None
    assert process.brake.process.wait(60) == -signal.SIGKILL
    with pytest.raises(TrainingLost, match="died"):
        completed(pieces)


def test_it_ends_when_the_server_closes_the_connection(tried: Bench) -> None:
    process = process_of(tried)
    completed(process.update("head", samples(4)))
    assert process.brake.process is not None
    assert process._connection is not None
    process._connection.close()
    assert process.brake.process.wait(60) == 0  # far above what it takes: only a process that stays fails


def test_tiny_drafters_are_trained_in_the_thread(tmp_path: Path) -> None:
    assert AdaptationConfig().train_in == "auto"
    assert bench(tmp_path).learner.training.process is None
