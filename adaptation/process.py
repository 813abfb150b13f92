"""Runs updates and replays in a separate process, because a training thread would hold the interpreter lock that
serving needs.

Weights lie in memory that both processes map, so that only samples and results are sent. If the process dies or does
not answer in time, the update under way is lost, and the next request starts another process.
"""

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import embedding

from adaptation.config import usable_cores
from adaptation.evaluator import replay_of, untrained_rows
from adaptation.policy import Arm, Pace
from adaptation.records import TrainingLost
from adaptation.samples import TrainingSample
from adaptation.timing import Brake, Pieces, TrainingTime, completed
from adaptation.trainer import OnlineTrainer, Rules, UpdateReport
from adaptation.weights import DrafterWeights, ServedDrafter, lend, mapped, shared
from drafters.network.model import DrafterConfig, SpecBlock
from drafters.training.corpus import Example
from kernels.cpu.library import use_threads

_EMBEDDING, _HEAD = "embedding", "head"  # names of the target's tables; a tied head is the embedding
_ENDING_SECONDS = 5.0
_POLL_SECONDS = 0.1  # interval between checks for an answer; commands can run in between
_LEAST_SHARE = 1 / 16
"""Least share of a core from which the time limit follows; with less, training would lag far behind the traffic."""
_UNKNOWN_SECONDS = 4.0
"""CPU seconds assumed for the imports (measured), and for the first request of each kind."""
_PR_SET_PDEATHSIG = 1  # Linux's prctl: the signal that a process gets when the thread that started it ends
_MIN_WEIGHTS = 1_000_000
"""Smallest drafter that gets a process: an update of a smaller one takes milliseconds, and a process costs 260 MB."""
_CHILD = """
import contextlib, ctypes, os, signal, sys
ctypes.CDLL(None).prctl({die_with_parent}, signal.SIGKILL)  # one that is stopped does not see the connection close
signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the server, which closes the connection
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that wait by spinning would take the cores of those that compute
os.nice(19)  # for sandboxes that know no idle priority
with contextlib.suppress(OSError): os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
sys.path[:] = {path!r}
from adaptation.process import main
main({memory}, {talk})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Description from which the training process builds its trainer and its replica on the shared weights."""

    config: DrafterConfig
    replica_dtype: torch.dtype
    rules: Rules
    seed: int
    head: str | None  # name of the target's output rows among the shared tensors
    shared: Mapping[str, Tensor]  # meta tensors: shapes and types, in the order in which they lie in memory


class TrainingProcess:
    """Client of the training process, for the learning thread: sends one request at a time, and replaces a process that
    died or does not answer in time.

    The time limit of an answer is the CPU time of the longest request of its kind so far, plus the imports before the
    first answer, on a share `_LEAST_SHARE` of a core. The limit doubles with every process lost in a row, since a
    request may take longer than any before.
    """

    def __init__(self, memory: int, setup: Setup, time: TrainingTime) -> None:
        """`memory`: file descriptor of the shared memory, which this object closes; `time`: receives the CPU seconds of
        the process."""
        self.num_started = 0
        self.is_asked = False  # whether a request is under way
        self.brake = Brake()
        self._memory = memory
        self._setup = setup
        self._time = time
        self._connection: Connection | None = None
        self._answer = Future[object]()
        self._longest: dict[str, float] = {}  # CPU seconds, by kind of request
        self._imports = 0.0  # CPU seconds allowed for the imports; 0 after the first answer
        self._num_lost = 0  # processes that did not answer in time, in a row
        self._closing = threading.Lock()
        weakref.finalize(self, os.close, memory)

    @property
    def pid(self) -> int | None:
        """Process id, or None if the process does not run."""
        process = self.brake.process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the process unless it runs. It ends with the calling thread. The next request waits for its imports,
        some seconds. Raises OSError."""
        if self._connection is not None:
            return
        ours, theirs = socket.socketpair()
        with ours, theirs:
            program = _CHILD.format(
                die_with_parent=_PR_SET_PDEATHSIG, path=sys.path, memory=self._memory, talk=theirs.fileno()
            )
            self.brake.process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=(self._memory, theirs.fileno()),
            )
            self._connection = Connection(ours.detach())
        _send(self._connection, self._setup)
        self.num_started += 1
        self._imports = _UNKNOWN_SECONDS

    def update(self, arm: Arm, samples: Sequence[TrainingSample], *, rate_share: float = 1.0) -> Pieces[UpdateReport]:
        """Run `OnlineTrainer.update` in the process; also yields while the process computes. Raises TrainingLost if the
        process dies or does not answer in time, RuntimeError for an exception in it."""
        self._revive()
        try:
            report = yield from self._ask("begin", arm, samples, rate_share=rate_share)
            while report is None:
                yield
                report = yield from self._ask("go_on")
        except GeneratorExit:
            if not completed(self._ask("abandon")):
                raise TrainingLost("the update was complete and cannot be undone") from None
            raise
        return cast(UpdateReport, report)

    def replay(self, model: SpecBlock, example: Example) -> Pieces[float]:
        """Replay a text with the replica in shared memory, the only model that is scored, and return tau. Yields and
        raises as `update` does."""
        self._revive()
        return cast(float, (yield from self._ask("replay", example)))

    def close(self) -> None:
        """End the process, by force if it computes or does not end. The next request starts another one."""
        self.brake.may_stop = False
        self.brake.go_on()
        with self._closing:
            process, connection = self.brake.process, self._connection
            self.brake.process = self._connection = None
            busy, self.is_asked = self.is_asked, False
        if process is not None and busy:
            process.kill()
            wait([self._answer], _ENDING_SECONDS)  # the exchange thread still uses the connection
        if connection is not None:
            connection.close()
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_SECONDS)
                return
            process.kill()
            process.wait()

    def _revive(self) -> None:
        """Start another process if this one does not run, or still computes for a thread that died."""
        if self.is_asked or (self.brake.process is not None and self.brake.process.poll() is not None):
            self.close()
        self.start()

    def _ask(self, call: str, *given: object, **named: object) -> Pieces[object]:
        """Send a request, yield until it is answered, and return the answer. If the generator is closed earlier, it
        waits a few seconds for the answer."""
        if self._connection is None:
            raise TrainingLost("the training process was ended")
        # A command waits for "abandon"; after the first answer the process is known to end with this one.
        self.is_asked, self.brake.may_stop = True, call != "abandon" and not self._imports
        (self.brake.go_on if self._time.may_compute or not self.brake.may_stop else self.brake.stop)()
        self._answer = _exchanged(self._connection, (call, given, named))
        work = self._longest.get(call, _UNKNOWN_SECONDS) + self._imports
        seconds = max(_ENDING_SECONDS, work / _LEAST_SHARE) * 2**self._num_lost
        if call == "abandon":  # an operator may be waiting for it
            seconds = _ENDING_SECONDS
        waited = 0.0  # seconds in this loop, without other work of this thread
        try:
            while not wait([self._answer], _POLL_SECONDS).done:
                waited += 0.0 if self.brake.is_stopped else _POLL_SECONDS
                if waited > seconds:
                    self._num_lost += 1
                    self.close()
                    raise TrainingLost(f"the training process has not answered within {seconds:.0f} seconds")
                yield
        except GeneratorExit:
            self.brake.may_stop = False
            self.brake.go_on()
            if not wait([self._answer], _ENDING_SECONDS).done:
                self.close()
            self.is_asked = False
            raise
        return self._result(call)

    def _result(self, call: str) -> object:
        try:
            answer = self._answer.result()
        except (EOFError, OSError) as error:
            self.close()
            raise TrainingLost("the training process has died") from error
        self.is_asked = self.brake.may_stop = False
        self._imports, self._num_lost = 0.0, 0
        result, failure, seconds = cast(tuple[object, str | None, float], answer)
        self._longest[call] = max(seconds, self._longest.get(call, 0.0))
        self._time.add_process_seconds(seconds)
        if failure is not None:
            raise RuntimeError(f"the training process raised an exception:\n{failure}")
        return result


class Training:
    """Runs updates in this thread or in the training process, counts them, and keeps their pace."""

    def __init__(self, trainer: OnlineTrainer, process: TrainingProcess | None, time: TrainingTime) -> None:
        self.trainer = trainer
        self.process = process
        self.time = time
        self.pace = Pace()
        time.brake = None if process is None else process.brake
        self.num_updates: Counter[Arm] = Counter()
        self.num_unjudged = 0  # updates since the training copy was judged

    @property
    def waits(self) -> bool:
        """Whether a request to the training process is under way."""
        return self.process is not None and self.process.is_asked

    def go_on(self) -> None:
        """Continue the training process if an engine step has stopped it."""
        if self.process is not None:
            self.process.brake.go_on()
            if not self.time.may_compute:  # a step has begun meanwhile
                self.process.brake.stop()

    def advanced(self, job: Pieces[None]) -> Pieces[None] | None:
        """Do the next piece of a job. Returns the job, or None at its end."""
        with contextlib.suppress(StopIteration), self.time.spent():
            next(job)
            return job
        return None

    def start(self) -> None:
        """Start the training process, if there is one. Raises OSError."""
        if self.process is not None:
            self.process.start()

    def close(self) -> None:
        """End the training process, if there is one; the next update starts another one."""
        if self.process is not None:
            self.process.close()

    def update(self, arm: Arm, samples: Sequence[TrainingSample]) -> Pieces[UpdateReport]:
        """Run `OnlineTrainer.update` here or in the training process, at the arm's share of the learning rate."""
        report = yield from (self.process or self.trainer).update(arm, samples, rate_share=self.pace.share(arm))
        self.num_updates[arm] += report.applied
        return report


def training_process(
    drafter: ServedDrafter,
    weights: DrafterWeights,
    trainer: OnlineTrainer,
    time: TrainingTime,
    train_in: Literal["auto", "process", "thread"],
) -> TrainingProcess | None:
    """Build the client of the training process, which computes on the trainer's weights and optimizers in shared
    memory. Returns None if this process trains. Raises ValueError if a process is required and not possible."""
    if not _in_its_own_process(train_in, drafter, weights):
        return None
    table, head = drafter.embedding, drafter.target_head
    assert table is not None, "a training process needs the target's embedding table"
    is_tied = head is not None and head.data_ptr() == table.data_ptr()
    computed_on = _computed_on(trainer, training=weights.training, anchor=weights.anchor, replica=weights.replica)
    tables = {_EMBEDDING: table} if head is None or is_tied else {_EMBEDDING: table, _HEAD: head}
    memory, tensors = shared(computed_on | tables)
    lend(tensors, computed_on)
    setup = Setup(
        config=drafter.config,
        replica_dtype=weights.replica.dtype,
        rules=trainer.rules,
        seed=trainer.seed,
        head=None if head is None else _EMBEDDING if is_tied else _HEAD,
        shared={name: tensor.to("meta") for name, tensor in tensors.items()},
    )
    return TrainingProcess(memory, setup, time)


def _in_its_own_process(train_in: str, drafter: ServedDrafter, weights: DrafterWeights) -> bool:
    possible = sys.platform == "linux" and weights.train_device.type == "cpu" and drafter.embedding is not None
    if train_in == "process" and not possible:
        raise ValueError("adaptation.train_in: process needs Linux and training on a CPU; choose auto or thread")
    worthwhile = sum(value.numel() for value in weights.training.parameters()) >= _MIN_WEIGHTS
    return train_in == "process" or (train_in == "auto" and possible and worthwhile)


def _computed_on(trainer: OnlineTrainer, **models: SpecBlock) -> dict[str, Tensor]:
    """Tensors that both processes compute on, by name; the names are the same in both."""
    tensors = {f"moments.{name}": value for name, value in trainer.moments().items()}
    for prefix, model in models.items():
        own = {**dict(model.named_parameters()), "d2t": model.d2t, "t2d": model.t2d}
        tensors |= {f"{prefix}.{name}": value for name, value in own.items()}
    return tensors


def main(memory: int, talk: int) -> None:
    """Run the training process on two inherited descriptors, until the server closes the connection."""
    connection = Connection(talk)
    try:
        setup = cast(Setup, _received(connection))
        use_threads(1)
        torch.set_num_threads(usable_cores())  # of torch's operations alone; compiled kernels use one
        calls = _calls(setup, mapped(memory, setup.shared), connection)
        while True:
            name, given, named = cast(tuple[str, tuple[object, ...], dict[str, object]], _received(connection))
            began, result, failure = time.thread_time(), None, None
            try:
                result = calls[name](*given, **named)
            except (EOFError, OSError):
                raise
            except Exception:
                failure = traceback.format_exc()
            # Of this thread, which takes part in all that several compute: as long as they run together.
            _send(connection, (result, failure, time.thread_time() - began))
    except (EOFError, OSError):
        return


def _calls(setup: Setup, tensors: Mapping[str, Tensor], connection: Connection) -> dict[str, Callable[..., object]]:
    """Request handlers by name: trainer and replay on the shared tensors."""
    dtypes = (torch.float32, torch.float32, setup.replica_dtype)
    training, anchor, replica = (SpecBlock(setup.config).to(dtype).eval().requires_grad_(False) for dtype in dtypes)
    embed = partial(embedding, weight=tensors[_EMBEDDING])
    rows = untrained_rows(anchor, None if setup.head is None else tensors[setup.head])
    trainer = OnlineTrainer(training, anchor, embed, rows, rules=setup.rules, seed=setup.seed)
    lend(tensors, _computed_on(trainer, training=training, anchor=anchor, replica=replica))
    begun: list[Pieces[UpdateReport]] = []  # the update under way

    def begin(arm: Arm, samples: Sequence[TrainingSample], *, rate_share: float) -> UpdateReport | None:
        begun[:] = [trainer.update(arm, samples, rate_share=rate_share)]
        return go_on()

    def go_on() -> UpdateReport | None:
        """Do the next piece of the update. Returns the report after the last piece, else None."""
        try:
            return next(begun[0])
        except StopIteration as end:
            begun.clear()
            return cast(UpdateReport, end.value)

    def abandon() -> bool:
        """Undo the update under way. Returns False if it was complete already."""
        for update in begun:
            update.close()
        return bool(begun)

    replay = partial(replay_of(embed), replica)
    return {"begin": begin, "go_on": go_on, "abandon": abandon, "replay": replay}


def _exchanged(connection: Connection, request: object) -> "Future[object]":
    """Send a request and receive its answer in a thread, since sending a large request to a stopped process blocks."""
    answer = Future[object]()

    def exchange() -> None:
        try:
            _send(connection, request)
            answer.set_result(_received(connection))
        except BaseException as error:  # raised again in the thread that waits
            answer.set_exception(error)

    threading.Thread(target=exchange, name="training", daemon=True).start()
    return answer


def _send(connection: Connection, what: object) -> None:
    connection.send_bytes(pickle.dumps(what))  # `Connection.send` would share tensors by /dev/shm


def _received(connection: Connection) -> object:
    return pickle.loads(connection.recv_bytes())
