"""Updates and replays in a process of their own, for a thread that trains makes the one that serves wait for the
interpreter that both share.

The weights lie in memory that both processes map, so that only samples and answers are sent. A process that dies costs
the update under way; the next request starts another one.
"""

import contextlib
import math
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import embedding

from adaptation.evaluator import Replay, replay_of
from adaptation.losses import untrained_rows
from adaptation.policy import Arm
from adaptation.records import TrainingLost
from adaptation.samples import TrainingSample
from adaptation.trainer import Rules, Trainer, UpdateReport
from adaptation.weights import DrafterWeights, ServedDrafter
from drafters.regret import GainPosterior
from drafters.specblock.model import SpecBlock, SpecBlockConfig
from drafters.training.corpus import Example

_EMBEDDING, _HEAD = "embedding", "head"  # names of the target's tables; a tied head is the embedding
_INTERRUPTED = "interrupted?"  # asked back before each step of an update
_ENDING_SECONDS = 5.0
_ALIGNMENT = 64  # bytes
_LEAST_WEIGHTS = 1_000_000
"""Of a drafter that is worth a process: with fewer an update takes milliseconds, and a process costs 400 MB."""
_DELAY, _DELAY_NOISE = 0.3, 0.5
"""Of a step beside training, in steps: what two cores showed, and how much single steps differ."""
_STEPS = 128  # that a mean of steps remembers
_GLANCE_SECONDS = 0.05  # between two looks at whether it may go on
_BUSY_SECONDS = 1.0  # after a step began, while serving counts as busy: longer than most steps
_CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the server, which closes the connection
sys.path[:] = {path!r}
from adaptation.process import main
main({memory}, {talk})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the other process is to build around the weights."""

    config: SpecBlockConfig
    replica_dtype: torch.dtype
    rules: Rules
    seed: int
    beside_memory: bool  # how drafters are replayed
    head: str | None  # name of the target's rows among the shared tensors
    shared: Mapping[str, Tensor]  # shapes and types, without memory, in the order in which they lie


class TrainingProcess:
    """The other process, as the thread that learns sees it: one request at a time; what has died is started again."""

    def __init__(self, memory: int, setup: Setup) -> None:
        """`memory`: a file descriptor, which this object closes."""
        self.seconds = 0.0  # that it has computed
        self.num_started = 0
        self.before_asking: Callable[[], None] = lambda: None  # may hold the request up
        self.may_compute: Callable[[], bool] = lambda: True  # asked all the while that a request is under way
        self.is_asked = False  # and somebody waits for its answer
        self._memory = memory
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closing = threading.Lock()
        self._is_frozen = self._waits = False  # by whoever holds it, and by `may_compute`
        weakref.finalize(self, os.close, memory)

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start it unless it runs: some seconds of imports, which the next request waits for."""
        if self._connection is not None:
            return
        ours, theirs = socket.socketpair()
        with ours, theirs:
            program = _CHILD.format(path=sys.path, memory=self._memory, talk=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=(self._memory, theirs.fileno()),
            )
            self._connection = Connection(ours.detach())
        _send(self._connection, self._setup)
        self.num_started += 1

    def update(
        self,
        arm: Arm,
        samples: Sequence[TrainingSample],
        interrupted: Callable[[], bool] = lambda: False,
        **named: object,
    ) -> UpdateReport:
        """As `Trainer.update`. Raises TrainingLost if the process dies over it, RuntimeError for what broke in it."""
        return cast(UpdateReport, self._ask("update", arm, samples, interrupted=interrupted, **named))

    def replay(self, model: SpecBlock, example: Example) -> float:
        """Of the replica, the one model that is scored. Raises as `update` does."""
        return cast(float, self._ask("replay", example))

    def freeze(self) -> None:
        """Stop it where it is, until `thaw`; who waits for its answer waits on."""
        self._is_frozen = True
        self._send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._is_frozen = False
        self._wait(self._waits)

    def quiet(self) -> None:
        """Let nothing compute on the shared weights: whoever asked last may have died before the answer."""
        if self.is_asked:
            self.close()

    def close(self) -> None:
        """End the process, at once if it does not end by itself. The next request starts another one."""
        with self._closing:
            process, connection = self._process, self._connection
            self._process = self._connection = None
            busy, self.is_asked = self.is_asked, False
        if connection is not None:
            connection.close()
        if process is not None:
            if busy:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_SECONDS)
                return
            process.kill()
            process.wait()

    def _ask(
        self, call: str, *given: object, interrupted: Callable[[], bool] = lambda: False, **named: object
    ) -> object:
        self.before_asking()
        self.quiet()
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it has died since, over nothing
        self.start()
        connection = self._connection
        assert connection is not None
        self.is_asked = True
        try:
            _send(connection, (call, given, named))
            while (answer := self._awaited(connection)) == _INTERRUPTED:
                _send(connection, interrupted())
        except (EOFError, OSError) as error:
            self.close()
            raise TrainingLost("the process that trains has died") from error
        self.is_asked = False
        result, failure, seconds = cast(tuple[object, str | None, float], answer)
        self.seconds += seconds
        if failure is not None:
            raise RuntimeError(f"the process that trains has failed:\n{failure}")
        return result

    def _awaited(self, connection: Connection) -> object:
        """The next answer; until it comes the process computes only while it may."""
        while not connection.poll(_GLANCE_SECONDS):
            waits = not self.may_compute()
            if waits != self._waits:
                self._wait(waits)
        self._wait(False)
        return _received(connection)

    def _wait(self, waits: bool) -> None:
        self._waits = waits
        self._send_signal(signal.SIGSTOP if waits or self._is_frozen else signal.SIGCONT)

    def _send_signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None:
            process.send_signal(number)


class _Usual:
    """What something usually takes: a geometric mean of the latest times, so that hiccups hardly count."""

    def __init__(self) -> None:
        self._log, self._count = 0.0, 0

    @property
    def seconds(self) -> float:
        return math.exp(self._log)

    def observe(self, seconds: float) -> None:
        self._count = min(self._count + 1, _STEPS)
        self._log += (math.log(seconds) - self._log) / self._count


class TrainingTime:
    """Seconds that training has computed, and those that it took from serving and nobody was charged for yet.

    Engine steps are timed while training computes and while it does not: what those of one kind take longer is what
    training takes from serving while both compute. It goes on only as far as the ledger covers that: a process is
    stopped wherever it is, a thread waits between two optimizer steps or two replays."""

    def __init__(
        self,
        device: torch.device,
        process: TrainingProcess | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.seconds = 0.0
        self.covers: Callable[[float], bool] = lambda seconds: True  # so many more that were taken from serving
        self.is_urged: Callable[[], bool] = lambda: False  # what is under way is to end at once
        self._cpu_clock = time.thread_time if device.type == "cpu" else time.perf_counter
        self._clock, self._sleep = clock, sleep
        self._process = process
        self._uncharged = self._slept = 0.0
        self._stepped_at = self._glanced_at = -math.inf
        self._computes = False
        self._alone: dict[Hashable, _Usual] = {}  # steps without training, by kind
        self._delay = GainPosterior(  # of a step beside training, in steps
            mean=_DELAY, sd=_DELAY, noise=_DELAY_NOISE, drift=(_DELAY_NOISE / _STEPS) ** 2
        )
        if process is not None:
            process.may_compute = self.may_compute

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        began = self._now()
        self._glanced_at, self._computes = self._clock(), True
        try:
            yield
        finally:
            self.may_compute()
            self._computes = False
            self.seconds += self._now() - began

    def stepped(self, kind: Hashable, seconds: float) -> bool:
        """A step of serving has ended; those of one kind take equally long. Called by the engine's thread.
        # -> whether it had no training beside it"""
        self._stepped_at = self._clock()
        if not self._computes:
            self._alone.setdefault(kind, _Usual()).observe(seconds)
            return True
        if kind in self._alone:
            self._delay.observe(seconds / self._alone[kind].seconds - 1.0)
        return False

    def stepping(self) -> None:
        """A step of serving begins. Called by the engine's thread."""
        self._stepped_at = self._clock()

    @property
    def is_idle(self) -> bool:
        """Whether nobody is served."""
        return self._clock() - self._stepped_at >= _BUSY_SECONDS

    @property
    def taken_share(self) -> float:
        """Of the time that training computes beside serving."""
        delay = max(0.0, self._delay.mean)
        return delay / (1.0 + delay)

    def taken(self) -> float:
        """Seconds that training took from serving since the last time."""
        seconds, self._uncharged = self._uncharged, 0.0
        return seconds

    def wait(self, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Wait until a thread may compute; to be called between its steps, within `spent`.
        # -> whether it was interrupted and is to end"""
        while not (is_interrupted := interrupted()) and not self.may_compute():
            before = self._cpu_clock()
            self._sleep(_GLANCE_SECONDS)
            self._slept += self._cpu_clock() - before
        return is_interrupted

    def paced(self, replay: Replay) -> Replay:
        """A replay that first waits until it may compute."""

        def waiting(model: SpecBlock, text: Example) -> float:
            self.wait()
            return replay(model, text)

        return waiting

    def may_compute(self) -> bool:
        """Charge what was computed since the last call. # -> whether training may go on: the server is idle, or what
        training takes is covered, or it is to end at once"""
        now = self._clock()
        is_busy = not self.is_idle
        if is_busy and self._computes:
            self._uncharged += (now - self._glanced_at) * self.taken_share
        self._glanced_at = now
        self._computes = not is_busy or self.covers(self._uncharged) or self.is_urged()
        return self._computes

    def _now(self) -> float:
        return self._cpu_clock() - self._slept + (0.0 if self._process is None else self._process.seconds)


def training_process(
    drafter: ServedDrafter, weights: DrafterWeights, trainer: Trainer, train_in: Literal["auto", "process", "thread"]
) -> TrainingProcess | None:
    """Who computes updates and replays, on the weights and optimizers of this trainer, unless this process does. Raises
    ValueError where that cannot be had."""
    if not _in_its_own_process(train_in, drafter, weights):
        return None
    table, head = drafter.embedding, drafter.target_head
    assert table is not None, "a process of its own has no table to look tokens up in"
    is_tied = head is not None and head.data_ptr() == table.data_ptr()
    computed_on = _computed_on(trainer, training=weights.training, anchor=weights.anchor, replica=weights.replica)
    tables = {_EMBEDDING: table} if head is None or is_tied else {_EMBEDDING: table, _HEAD: head}
    memory, tensors = shared(computed_on | tables)
    _lend(tensors, computed_on)
    setup = Setup(
        config=drafter.config,
        replica_dtype=weights.replica.dtype,
        rules=trainer.rules,
        seed=trainer.seed,
        beside_memory=not drafter.made,
        head=None if head is None else _EMBEDDING if is_tied else _HEAD,
        shared={name: tensor.to("meta") for name, tensor in tensors.items()},
    )
    return TrainingProcess(memory, setup)


def _in_its_own_process(train_in: str, drafter: ServedDrafter, weights: DrafterWeights) -> bool:
    possible = sys.platform == "linux" and weights.train_device.type == "cpu" and drafter.embedding is not None
    if train_in == "process" and not possible:
        raise ValueError("adaptation.train_in: a process of its own trains on Linux, on a CPU; choose auto or thread")
    worthwhile = sum(value.numel() for value in weights.training.parameters()) >= _LEAST_WEIGHTS
    return train_in == "process" or (train_in == "auto" and possible and worthwhile)


def _computed_on(trainer: Trainer, **models: SpecBlock) -> dict[str, Tensor]:
    """All that both processes compute on, with the same names in both: as objects that may be given other memory."""
    tensors = {f"moments.{name}": value for name, value in trainer.moments().items()}
    for prefix, model in models.items():
        own = {**dict(model.named_parameters()), "d2t": model.d2t, "t2d": model.t2d}
        tensors |= {f"{prefix}.{name}": value for name, value in own.items()}
    return tensors


def shared(named: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
    """Copies of tensors in memory that a process which inherits its descriptor may map too. It has no name: that of
    /dev/shm, which containers keep small, is not asked for."""
    memory = os.memfd_create("adaptree-training")
    os.ftruncate(memory, sum(_room(tensor) for tensor in named.values()))
    tensors = mapped(memory, named)
    for name, tensor in named.items():
        tensors[name].copy_(tensor.detach())
    return memory, tensors


def mapped(memory: int, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of these shapes and types, one behind another. Who holds one of them keeps the memory alive."""
    pages, tensors, start = mmap.mmap(memory, os.fstat(memory).st_size), {}, 0
    for name, tensor in like.items():
        flat = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        tensors[name] = flat.view(tensor.shape)
        start += _room(tensor)
    return tensors


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _lend(tensors: Mapping[str, Tensor], to: Mapping[str, Tensor]) -> None:
    """Parameters stay the same objects, in other memory."""
    for name, tensor in to.items():
        tensor.data = tensors[name]


def main(memory: int, talk: int) -> None:
    """The other process, with the descriptors it has inherited. Ends when the other end is closed."""
    connection = Connection(talk)
    try:
        setup = cast(Setup, _received(connection))
        os.nice(setup.rules.tuning.niceness)
        torch.set_num_threads(1)
        calls = _calls(setup, mapped(memory, setup.shared), connection)
        while True:
            name, given, named = cast(tuple[str, tuple[object, ...], dict[str, object]], _received(connection))
            began, result, failure = time.process_time(), None, None
            try:
                result = calls[name](*given, **named)
            except (EOFError, OSError):
                raise
            except Exception:
                failure = traceback.format_exc()
            _send(connection, (result, failure, time.process_time() - began))
    except (EOFError, OSError):
        return


def _calls(setup: Setup, tensors: Mapping[str, Tensor], connection: Connection) -> dict[str, Callable[..., object]]:
    """The same parts as where a thread trains, on tensors that are shared."""
    dtypes = (torch.float32, torch.float32, setup.replica_dtype)
    training, anchor, replica = (SpecBlock(setup.config).to(dtype).eval().requires_grad_(False) for dtype in dtypes)
    embed = partial(embedding, weight=tensors[_EMBEDDING])
    rows = untrained_rows(anchor, None if setup.head is None else tensors[setup.head])
    trainer = Trainer(training, anchor, embed, rows, rules=setup.rules, seed=setup.seed)
    _lend(tensors, _computed_on(trainer, training=training, anchor=anchor, replica=replica))

    def interrupted() -> bool:
        _send(connection, _INTERRUPTED)
        return cast(bool, _received(connection))

    return {
        "update": partial(trainer.update, interrupted=interrupted),
        "replay": partial(replay_of(embed, beside_memory=setup.beside_memory), replica),
    }


def _send(connection: Connection, what: object) -> None:
    connection.send_bytes(pickle.dumps(what))  # `Connection.send` would share tensors by /dev/shm


def _received(connection: Connection) -> object:
    return pickle.loads(connection.recv_bytes())
