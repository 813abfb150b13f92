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
from adaptation.process import Training, TrainingProcess, mapped, shared
from adaptation.records import TrainingLost
from adaptation.timing import TrainingTime
from drafters.specblock.checkpoint import weights_of
from drafters.specblock.model import SpecBlock
from drafters.training.corpus import Example
from tests.adaptation.drafts import same
from tests.adaptation.samples import Bench, bench, drafter, feedback, full_bench, samples
from tests.adaptation.test_trainer import trainer
from tests.adaptation.worlds import Clock

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
    assert same(tried.learner.training.trainer.tensors(), alone.learner.training.trainer.tensors())
    assert process_of(tried).num_started == 1
    assert tried.learner.training.time.seconds > 0


def test_it_asks_before_each_step_and_breaks_off(tried: Bench) -> None:
    before = {name: value.clone() for name, value in tried.learner.training.trainer.tensors().items()}
    asked = iter([False, False, True])
    report = process_of(tried).update("full", samples(4), lambda: next(asked))
    assert (report.outcome, len(report.losses)) == ("interrupted", 2)
    assert same(before, tried.learner.training.trainer.tensors())


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
    before = {name: value.clone() for name, value in tried.learner.training.trainer.tensors().items()}
    with pytest.raises(RuntimeError, match="Traceback"):
        process.update("head", broken)
    assert same(before, tried.learner.training.trainer.tensors())
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


def timed(covered: float) -> tuple[TrainingTime, Clock]:
    """With so many seconds to take from serving, whose steps take 50 ms, and twice as long beside training."""
    clock = Clock()
    return TrainingTime(torch.device("cpu"), lambda taken: taken < covered, clock=clock), clock


def step(time: TrainingTime, clock: Clock, seconds: float) -> None:
    clock.now += seconds
    time.stepped("decode", seconds)


def test_a_thread_waits_between_its_steps_for_what_serving_can_afford() -> None:
    """One percent of the time of serving is added to what it may take."""
    clock, balance, waited = Clock(), 1.0, 0
    trained: TrainingTime

    def serve(seconds: float) -> None:
        nonlocal balance
        balance += 0.01 * seconds
        step(trained, clock, seconds)

    def sleep(seconds: float) -> None:
        nonlocal waited
        waited += 1
        serve(seconds)

    trained = TrainingTime(torch.device("cpu"), lambda taken: taken < balance, clock=clock, sleep=sleep)
    serve(0.05)
    clock.now += 5.0
    with trained.spent():
        for _ in range(100):
            assert not trained.wait()
            assert trained._uncharged < balance
            serve(0.05 * 1.3)  # an optimizer step beside an engine step, which takes 0.3 times as long again
    taken = trained.taken()
    assert taken == pytest.approx(100 * 0.05 * 0.3, rel=0.01)
    assert taken <= balance + 0.05
    assert waited > 20


def test_a_replay_in_a_thread_waits_until_it_is_covered() -> None:
    clock, order = Clock(), list[str]()
    time = TrainingTime(
        torch.device("cpu"), lambda _: len(order) == 2, clock=clock, sleep=lambda _: order.append("waits")
    )
    time.stepping()

    def replay(model: SpecBlock, example: Example) -> float:
        order.append("replays")
        return 2.5

    example = samples(1)[0].example
    assert example is not None
    with time.spent():
        assert Training(trainer()[0], None, time).paced(replay)(drafter(), example) == 2.5
    assert order == ["waits", "waits", "replays"]


def test_a_process_trains_for_nothing_while_nobody_is_served() -> None:
    time, clock = timed(covered=0.0)
    with time.spent():
        for _ in range(100):
            clock.now += 0.05
            assert time.may_compute()
    assert time.taken() == 0.0


@pytest.mark.parametrize("longer", [0.0, 0.25, 1.0])
def test_what_training_takes_is_what_steps_beside_it_take_longer(longer: float) -> None:
    time, clock = timed(covered=1e9)
    for _ in range(20):
        for _ in range(50):
            step(time, clock, 0.05)
        with time.spent():
            for _ in range(50):
                step(time, clock, 0.05 * (1.0 + longer))
                time.may_compute()
    assert time.taken_share == pytest.approx(longer / (1.0 + longer), abs=0.02)


def test_other_kinds_of_steps_and_hiccups_say_nothing_of_training() -> None:
    """Prompts, which are read while nothing is trained, take ten times as long."""
    time, clock = timed(covered=1e9)
    for _ in range(20):
        for number in range(50):
            clock.now += 0.5
            time.stepped("prompt", 0.5)
            step(time, clock, 0.2 if number == 7 else 0.05)
        with time.spent():
            for _ in range(50):
                step(time, clock, 0.05 * 1.25)
                time.may_compute()
    assert time.taken_share == pytest.approx(0.2, abs=0.04)


def test_beside_serving_it_trains_as_long_as_that_is_covered() -> None:
    time, clock = timed(covered=1.0)
    share, computed = time.taken_share, 0.0
    with time.spent():
        for _ in range(200):
            step(time, clock, 0.05)
            computed += 0.05 * time.may_compute()
        assert share * computed == pytest.approx(1.0, abs=0.05)
        clock.now += 5.0
        assert time.may_compute(), "nobody is served any more"
    assert time.taken() == pytest.approx(1.0, abs=0.05)
