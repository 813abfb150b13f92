"""A process of its own trains to the bit as a thread would, and its death costs one update."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adaptation.config import AdaptationConfig
from adaptation.learner import worker_of
from adaptation.process import TrainingProcess, mapped, shared
from adaptation.records import TrainingLost
from drafters.specblock.checkpoint import weights_of
from tests.adaptation.drafts import same
from tests.adaptation.samples import Bench, bench, drafter, feedback, full_bench, samples

torch.set_num_threads(1)
pytestmark = [pytest.mark.usefixtures("impatient"), pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")]


@pytest.fixture
def tried(tmp_path: Path) -> Iterator[Bench]:
    made = full_bench(tmp_path / "process", train_in="process")
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
            tried.learner.update()
        tried.weights.between_steps()


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


def test_it_asks_before_each_step_and_breaks_off(tried: Bench) -> None:
    before = {name: value.clone() for name, value in tried.trainer.tensors().items()}
    asked = iter([False, False, True])
    report = process_of(tried).update("full", samples(4), lambda: next(asked))
    assert (report.outcome, len(report.losses)) == ("interrupted", 2)
    assert same(before, tried.trainer.tensors())


@pytest.mark.parametrize("step", [0, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 2))])
def test_a_process_killed_amid_an_update_costs_that_update(tried: Bench, step: int) -> None:
    learn(tried, 8)
    process, served = process_of(tried), weights_of(tried.serving)
    served = {name: value.clone() for name, value in served.items()}
    asked = iter(range(9))

    def kills() -> bool:
        if next(asked) == step:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        return False

    learn(tried, 12, updates=False)
    with pytest.raises(TrainingLost, match="died"):
        tried.learner.update(kills)
    tried.learner.recover("killed")
    assert same(weights_of(tried.weights.training), served)
    learn(tried, 12)
    assert process.num_started == 2
    assert tried.learner.training.num_updates["full"] > 0


@pytest.mark.slow
def test_one_that_died_over_nothing_is_not_missed(tried: Bench) -> None:
    process = process_of(tried)
    process.update("head", samples(4))
    first = process.pid
    assert first is not None
    assert process._process is not None
    os.kill(first, signal.SIGKILL)
    process._process.wait()
    report = process.update("head", samples(4))
    assert report.applied
    assert process.pid != first


def test_what_breaks_in_it_is_told_and_changes_nothing(tried: Bench) -> None:
    process, broken = process_of(tried), samples(2)
    draft_labels = broken[0].draft_labels
    broken[0] = replace(broken[0], draft_labels=replace(draft_labels, states=draft_labels.states[:, :7]))
    before = {name: value.clone() for name, value in tried.trainer.tensors().items()}
    with pytest.raises(RuntimeError, match="Traceback"):
        process.update("head", broken)
    assert same(before, tried.trainer.tensors())
    report = process.update("head", samples(4))
    assert report.applied
    assert process.num_started == 1


def test_whoever_asked_and_is_gone_leaves_nobody_computing(tried: Bench) -> None:
    """A thread that dies while it waits must not let its update go on beneath the next one."""
    process = process_of(tried)

    def dies() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.update("full", samples(4), dies)
    tried.learner.recover("thread_died")
    assert process.pid is None
    assert same(weights_of(tried.weights.training), weights_of(drafter()))


def test_a_pause_does_not_wait_until_an_update_is_covered(tried: Bench) -> None:
    """Under load that covers nothing the process is stopped amid its update."""
    learner, process = tried.learner, process_of(tried)
    process.update("head", samples(4))
    learner.training.time._covers = lambda taken: not process.is_asked
    worker, ended = worker_of(learner, tried.tuning), threading.Event()

    def serve() -> None:
        while not ended.wait(0.01):
            learner.training.time.stepping()

    serving = threading.Thread(target=serve)
    serving.start()
    worker.start()
    try:
        deadline = time.monotonic() + 20
        while not process._waits:
            assert time.monotonic() < deadline, tried.events
            worker.ask(lambda: learn(tried, 1, updates=False))
            time.sleep(0.05)
        worker.ask(learner.pause, urgent=True).result(10)
    finally:
        ended.set()
        serving.join()
        assert worker.stop()
    assert (tried.events[-1].kind, tried.events[-1].reason) == ("paused", "operator")


def test_it_heeds_no_interrupt_of_the_terminal_and_ends_with_the_server(tried: Bench) -> None:
    process = process_of(tried)
    process.update("head", samples(4))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.update("head", samples(4))
    assert process.num_started == 1
    assert process._process is not None
    assert process._connection is not None
    process._connection.close()
    assert process._process.wait(60) == 0  # far above what it takes: only a process that stays fails


def test_who_maps_the_memory_finds_and_changes_what_was_put_in() -> None:
    named = {
        "halves": torch.randn(7, dtype=torch.bfloat16),
        "ids": torch.arange(9),
        "step": torch.tensor(4.0),
        "flags": torch.tensor([True, False, True]),
        "weights": torch.randn(3, 5),
    }
    memory, tensors = shared(named)
    again = mapped(memory, {name: tensor.to("meta") for name, tensor in named.items()})
    os.close(memory)
    assert same(again, named)
    again["weights"].fill_(2.0)
    assert bool((tensors["weights"] == 2.0).all())
    assert not bool((named["weights"] == 2.0).any())


def test_tiny_drafters_are_trained_in_the_thread(tmp_path: Path) -> None:
    assert AdaptationConfig().train_in == "auto"
    assert bench(tmp_path).learner.training.process is None
