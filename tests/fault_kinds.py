"""The faults that learning must outlive, each as a function that lets it strike a stream so many times."""

import errno
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adaptation import evaluator
from adaptation.checkpoint import SnapshotRing
from adaptation.feedback import FeedbackFilter
from adaptation.monitor import RollbackMonitor
from adaptation.persistence import LearnerCheckpoint
from adaptation.policy import Arm
from adaptation.process import TrainingProcess
from adaptation.publisher import Gate
from adaptation.samples import SampleBuffers
from adaptation.trainer import OnlineTrainer
from adaptation.weights import DrafterWeights, Version
from benchmarks.policies import EveryBatch
from tests.adaptation.damage import all_files, flip, truncate
from tests.fault_parts import Fault, Stream, Strike, learning_stream
from tests.practised import Practised

Place = tuple[object, str]

STAGES: dict[str, Place] = {
    "hearing": (FeedbackFilter, "take"),
    "taking the buffer": (SampleBuffers, "take"),
    "preparing the sample": (OnlineTrainer, "_steps"),
    "optimizer step": (OnlineTrainer, "_step"),
    "clipping": (OnlineTrainer, "_clip_update"),
    "loading the candidate": (DrafterWeights, "candidate"),
    "replaying": (evaluator, "replay_served"),
    "judging": (Gate, "decide"),
    "write preparation": (DrafterWeights, "_prepared"),
    "snapshot write": (Path, "write_bytes"),
    "snapshot sync": (os, "fsync"),
    "trimming the ring": (SnapshotRing, "_make_room"),
    "staging": (DrafterWeights, "_stage"),
    "telling the policy": (EveryBatch, "ended"),
    "resetting the watch": (RollbackMonitor, "weights_changed"),
    "state write": (LearnerCheckpoint, "save"),
}
"""Where an update is made to break, in its order."""

EVERYWHERE = (*STAGES, "forward", "backward")

DISK: tuple[Place, ...] = (
    (Path, "write_bytes"),
    (os, "fsync"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "mkdir"),
)


def breaks() -> None:
    raise RuntimeError("broken on purpose")


def dies() -> None:
    """No guard of ordinary errors sees it: the thread ends."""
    raise SystemExit("killed on purpose")


def exceptions(stream: Stream, times: int, stages: Sequence[str] = EVERYWHERE) -> None:
    """At every stage, before or after its work, so many times."""
    for stage in _shuffled(stream.rng, [*stages] * times):
        stream.survive(f"exception in {stage}", _at(stream, stage, breaks))
    failures = stream.adaptive.worker.failures
    assert failures["observe"] + failures["update"] >= times * len(stages)
    assert stream.adaptive.worker.num_restarts == 0


def kills(stream: Stream, times: int, stages: Sequence[str] = EVERYWHERE) -> None:
    """The learning thread dies, at every stage so many times."""
    for stage in _shuffled(stream.rng, [*stages] * times):
        stream.survive(f"thread killed in {stage}", _at(stream, stage, dies))
    assert stream.adaptive.worker.num_restarts == times * len(stages)


def few_kills(stream: Stream, times: int) -> None:
    kills(stream, times, ("hearing", "backward", "snapshot write"))


def broken_recoveries(stream: Stream, times: int) -> None:
    """An exception, and another one while the learner tidies up."""
    for _ in range(times):

        @contextmanager
        def both(strike: Strike) -> Iterator[None]:
            with ExitStack() as traps:

                def breaks_twice() -> None:  # not before: the training copy starts over after refusals, too
                    second = _striking(stream, (DrafterWeights, "train_from_served"), breaks, skip=0, after=False)
                    traps.enter_context(second(strike))
                    breaks()

                first = _striking(stream, (OnlineTrainer, "_step"), breaks_twice, skip=0, after=True)
                traps.enter_context(first(Strike()))
                yield

        stream.survive("exception in recovery", both)
    assert stream.adaptive.worker.failures["recover"] >= times


def not_finite(stream: Stream, times: int) -> None:
    """NaN in the loss, in a gradient, in the optimizer before and during an update: that update is discarded. A head
    update's optimizer has no state. A rollback may discard another update meanwhile, as interrupted."""

    def num_discarded() -> int:
        return sum(event.kind == "discarded" and event.reason.endswith("not_finite") for event in stream.events)

    faults: dict[str, Callable[[], Fault]] = {
        "loss": lambda: _in_the_graph(stream, "forward", _not_a_number),
        "gradient": lambda: _in_the_graph(stream, "backward", _not_a_number),
    }
    if stream.arm == "full":
        faults["optimizer"] = lambda: _at(stream, "taking the buffer", lambda: _spoil_optimizer(stream))
        faults["optimizer step"] = lambda: _at(stream, "optimizer step", lambda: _spoil_optimizer(stream))
    for what in _shuffled(stream.rng, list(faults) * times):
        before = num_discarded()
        stream.survive(f"NaN in {what}", faults[what]())
        assert num_discarded() == before + 1
    assert stream.adaptive.worker.failures == {}


def full_disks(stream: Stream, times: int) -> None:
    """Any one operation of a write finds no space, and the next ones of its kind; that is no failure of learning."""
    for place in _shuffled(stream.rng, list(DISK) * times):
        fault = _disk_full(stream, place, lasting=stream.rng.randint(1, 6))
        stream.survive(f"disk full in {place[1]}", fault)
    reported = {(event.kind, event.reason if event.kind == "refused" else "") for event in stream.events}
    assert {("refused", "not_stored"), ("not_stored", "")} <= reported
    assert stream.adaptive.worker.failures == {}


def rollbacks(stream: Stream, times: int) -> None:
    """Asked for in the middle of an update: it comes after that update, and takes it back if it was published."""
    for stage in _shuffled(stream.rng, ["optimizer step", "replaying", "snapshot write", "state write"] * times):
        stream.publish()
        answers: list[Future[Version]] = []

        def ask(answers: list[Future[Version]] = answers) -> None:
            answers.append(stream.adaptive.worker.ask(stream.adaptive.learner.rollback))

        stream.survive(f"rollback during {stage}", _at(stream, stage, ask))
        restored = answers[0].result(timeout=60)
        condemned = [event for event in stream.events if event.kind == "rolled_back" and event.reason == "operator"][-1]
        assert restored.origin < condemned.numbers["condemned"]
        assert condemned.numbers["condemned"] in stream.adaptive.learner.weights.condemned
    assert stream.adaptive.worker.failures == {}


def dead_processes(stream: Stream, times: int) -> None:
    """The process that trains is killed, at any moment around an update or a replay."""
    process = stream.adaptive.learner.training.process
    assert process is not None
    for _ in range(times):
        delay = stream.rng.choice([0.0, 0.005, 0.02, 0.1])

        def kill(delay: float = delay) -> None:
            pid = process.pid
            if pid is not None:
                threading.Timer(delay, os.kill, (pid, signal.SIGKILL)).start()

        fault = _striking(stream, (TrainingProcess, "_ask"), kill, skip=stream.rng.randrange(3), after=False)
        stream.survive("killed process", fault)
    assert process.num_started > times / 2, "it was never struck"
    assert stream.adaptive.worker.num_restarts == 0


KINDS: dict[str, Callable[[Stream, int], None]] = {
    "exceptions": exceptions,
    "kills": kills,
    "broken recoveries": broken_recoveries,
    "not finite": not_finite,
    "full disks": full_disks,
    "rollbacks": rollbacks,
}


def restart_served_after_damage(practised: Practised, folder: Path, *, times: int) -> None:
    """Again and again a process learns, ends, finds files damaged, and serves and learns on."""
    rng = random.Random(0)
    for number in range(times):
        with learning_stream(practised, folder, arm="head", seed=number) as struck:
            struck.publish()
            struck.check()
        for path in rng.sample(all_files(folder), rng.randint(1, 3)):
            rng.choice((flip, truncate))(path, rng)


def _shuffled(rng: random.Random, items: Sequence[Any]) -> list[Any]:
    return rng.sample(items, len(items))


def _at(stream: Stream, stage: str, action: Callable[[], None]) -> Fault:
    """An action at a stage, at whichever of its next calls, before or after its work."""

    def act(value: Tensor) -> Tensor:
        action()
        return value

    if stage in ("forward", "backward"):
        return _in_the_graph(stream, stage, act)
    skip, after = stream.rng.randrange(3), stream.rng.random() < 0.5
    return _striking(stream, STAGES[stage], action, skip=skip, after=after)


def _striking(stream: Stream, place: Place, action: Callable[[], None], *, skip: int, after: bool) -> Fault:
    @contextmanager
    def waiting(strike: Strike) -> Iterator[None]:
        usual, calls = getattr(*place), iter(range(skip, -(10**9), -1))

        def patched(*arguments: Any, **options: Any) -> Any:
            if next(calls) != 0:
                return usual(*arguments, **options)
            result = usual(*arguments, **options) if after else None
            stream.witness.note(strike)
            action()
            return result if after else usual(*arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*place, patched)
            yield

    return waiting


def _in_the_graph(stream: Stream, where: str, action: Callable[[Tensor], Tensor]) -> Fault:
    """Something becomes of the loss when it is computed, or of its gradient in the backward pass."""

    @contextmanager
    def waiting(strike: Strike) -> Iterator[None]:
        usual, calls = OnlineTrainer._step, iter(range(stream.rng.randrange(3), -(10**9), -1))

        def strikes(value: Tensor) -> Tensor:
            stream.witness.note(strike)
            return action(value)

        def patched(trainer: OnlineTrainer, arm: Arm, terms: Any, rate_share: float) -> Any:
            loss, parts = terms
            if next(calls) == 0:
                if where == "forward":
                    loss = strikes(loss)
                else:
                    loss.register_hook(strikes)
            return usual(trainer, arm, (loss, parts), rate_share)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OnlineTrainer, "_step", patched)
            yield

    return waiting


def _disk_full(stream: Stream, place: Place, *, lasting: int) -> Fault:
    """So many calls in a row find no space, after up to two that do; of what was to be written a piece is there."""

    @contextmanager
    def waiting(strike: Strike) -> Iterator[None]:
        usual, first, calls = getattr(*place), stream.rng.randrange(3), count()

        def patched(*arguments: Any, **options: Any) -> Any:
            if not first <= next(calls) < first + lasting:
                return usual(*arguments, **options)
            if place[1] == "write_bytes":
                path, data = arguments
                usual(path, data[: stream.rng.randrange(len(data))])
            stream.witness.note(strike)
            raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*place, patched)
            yield

    return waiting


def _not_a_number(value: Tensor) -> Tensor:
    return value * torch.nan


def _spoil_optimizer(stream: Stream) -> None:
    """One number of the moments, in whichever tensor."""
    moments = stream.adaptive.learner.training.trainer._optimizers[stream.arm].tensors()
    value = stream.rng.choice([value for value in moments.values() if value.ndim])
    value.view(-1)[stream.rng.randrange(value.numel())] = torch.nan
