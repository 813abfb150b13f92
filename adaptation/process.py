"""Updates and replays in a process of their own, for a thread that trains makes the one that serves wait for the
interpreter that both share.

The weights lie in memory that both processes map, so that only samples and answers are sent. A process that dies costs
the update under way; the next request starts another one.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import embedding

from adaptation.arena import Arena, Places
from adaptation.evaluator import Replay, replay_of
from adaptation.policy import Arm
from adaptation.records import TrainingLost
from adaptation.samples import TrainingSample
from adaptation.trainer import Rules, Trainer, UpdateReport
from adaptation.vocabulary import Rows, untrained_rows
from adaptation.weights import DrafterWeights, ServedDrafter
from drafters.specblock.model import SpecBlock, SpecBlockConfig
from drafters.training.corpus import Example

EMBEDDING, HEAD = "embedding", "head"
"""Names of the target's tables in the arena; a tied head is the embedding."""
_INTERRUPTED = "interrupted?"  # asked back before each step of an update
_ENDING_SECONDS = 5.0
_LEAST_WEIGHTS = 1_000_000
"""Of a drafter that is worth a process: with fewer an update takes milliseconds, and a process costs 400 MB."""
_CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the server, which closes the connection
sys.path[:] = {path!r}
from adaptation.process import main
main({arena}, {talk})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the other process is to build around the weights."""

    config: SpecBlockConfig
    replica_dtype: torch.dtype
    rules: Rules
    seed: int
    niceness: int
    head: str | None  # name of the target's rows in the arena
    places: Places


@dataclass(frozen=True, slots=True)
class Train:
    """Asks for an update of the training copy."""

    arm: Arm
    samples: Sequence[TrainingSample]
    vocabulary: Tensor | None
    rate_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Done:
    """The answer; `error` is a traceback."""

    result: UpdateReport | float | None
    error: str | None
    seconds: float  # of computing


def _never() -> bool:
    return False


class TrainingProcess:
    """The other process, as the thread that learns sees it: one request at a time; what has died is started again."""

    def __init__(self, arena: Arena, setup: Setup) -> None:
        self.seconds = 0.0  # that it has computed
        self.num_started = 0
        self.before_asking: Callable[[], None] = lambda: None  # may hold the request up
        self._arena = arena
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self.is_asked = False  # and somebody waits for its answer
        self._closing = threading.Lock()

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
            program = _CHILD.format(path=sys.path, arena=self._arena.handle, talk=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=(self._arena.handle, theirs.fileno()),
            )
            self._connection = Connection(ours.detach())
        self._connection.send_bytes(pickle.dumps(self._setup))
        self.num_started += 1

    def ask(self, request: Train | Example, interrupted: Callable[[], bool] = _never) -> UpdateReport | float:
        """Raises TrainingLost if the process dies over it, RuntimeError for what broke in it."""
        self.before_asking()
        self.quiet()
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it has died since, over nothing
        self.start()
        connection = self._connection
        assert connection is not None
        self.is_asked = True
        try:
            connection.send_bytes(pickle.dumps(request))
            while isinstance(answer := pickle.loads(connection.recv_bytes()), str):  # _INTERRUPTED
                connection.send_bytes(pickle.dumps(interrupted()))
        except (EOFError, OSError) as error:
            self.close()
            raise TrainingLost("the process that trains has died") from error
        self.is_asked = False
        self.seconds += answer.seconds
        if answer.error is not None:
            raise RuntimeError(f"the process that trains has failed:\n{answer.error}")
        return cast(UpdateReport | float, answer.result)

    def freeze(self) -> None:
        """Stop it where it is, until `thaw`; who waits for its answer waits on."""
        self._send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._send_signal(signal.SIGCONT)

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

    def _send_signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None:
            process.send_signal(number)


class RemoteTrainer(Trainer):
    """A trainer whose updates another process computes; everything else is done here, on the same memory."""

    process: TrainingProcess

    def update(
        self,
        arm: Arm,
        samples: Sequence[TrainingSample],
        interrupted: Callable[[], bool] = _never,
        *,
        vocabulary: Tensor | None = None,
        rate_share: float = 1.0,
    ) -> UpdateReport:
        return cast(UpdateReport, self.process.ask(Train(arm, samples, vocabulary, rate_share), interrupted))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.process.quiet()
        super().load(weights)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.process.quiet()
        super().load_tensors(tensors)


def remote_replay(process: TrainingProcess, replica: SpecBlock) -> Replay:
    """Replays whatever the shared replica holds."""

    def replay(model: SpecBlock, example: Example) -> float:
        assert model is replica, "the other process knows no other model"
        return cast(float, process.ask(example))

    return replay


def training_parts(
    drafter: ServedDrafter,
    weights: DrafterWeights,
    rows: Rows,
    rules: Rules,
    *,
    train_in: Literal["auto", "process", "thread"],
    niceness: int,
    seed: int,
) -> tuple[Trainer, Replay, TrainingProcess | None]:
    """Who computes updates and replays: this process, or one of its own. Raises ValueError where that cannot be had."""
    generator = torch.Generator().manual_seed(seed)
    if not _in_its_own_process(train_in, drafter, weights):
        trainer = Trainer(weights.training, weights.anchor, drafter.embed, rows, rules=rules, generator=generator)
        return trainer, replay_of(drafter.embed), None
    remote = RemoteTrainer(weights.training, weights.anchor, drafter.embed, rows, rules=rules, generator=generator)
    table, head = drafter.embedding, drafter.target_head
    assert table is not None, "a process of its own has no table to look tokens up in"
    is_tied = head is not None and head.data_ptr() == table.data_ptr()
    computed_on = shared_tensors(remote, training=weights.training, anchor=weights.anchor, replica=weights.replica)
    tables = {EMBEDDING: table} if head is None or is_tied else {EMBEDDING: table, HEAD: head}
    arena = Arena.holding(computed_on | tables)
    arena.lend(computed_on)
    setup = Setup(
        config=drafter.config,
        replica_dtype=weights.replica.dtype,
        rules=rules,
        seed=seed,
        niceness=niceness,
        head=None if head is None else EMBEDDING if is_tied else HEAD,
        places=arena.places,
    )
    remote.process = process = TrainingProcess(arena, setup)
    return remote, remote_replay(process, weights.replica), process


def _in_its_own_process(train_in: str, drafter: ServedDrafter, weights: DrafterWeights) -> bool:
    possible = sys.platform == "linux" and weights.train_device.type == "cpu" and drafter.embedding is not None
    if train_in == "process" and not possible:
        raise ValueError("adaptation.train_in: a process of its own trains on Linux, on a CPU; choose auto or thread")
    worthwhile = sum(value.numel() for value in weights.training.parameters()) >= _LEAST_WEIGHTS
    return train_in == "process" or (train_in == "auto" and possible and worthwhile)


def shared_tensors(
    trainer: Trainer, *, training: SpecBlock, anchor: SpecBlock, replica: SpecBlock
) -> dict[str, Tensor]:
    """All that both processes compute on, with the same names in both: as objects that may be given other memory."""
    tensors = {f"moments.{name}": value for name, value in trainer.moments().items()}
    for prefix, model in {"training": training, "anchor": anchor, "replica": replica}.items():
        own = {**dict(model.named_parameters()), "d2t": model.d2t, "t2d": model.t2d}
        tensors |= {f"{prefix}.{name}": value for name, value in own.items()}
    return tensors


def main(arena: int, talk: int) -> None:
    """`arena` and `talk` are descriptors that this process has inherited. Ends when the other end is closed."""
    connection = Connection(talk)
    try:
        setup: Setup = pickle.loads(connection.recv_bytes())
        os.nice(setup.niceness)
        torch.set_num_threads(1)
        _Work(setup, Arena(arena, setup.places), connection).serve()
    except (EOFError, OSError):
        return


class _Work:
    """The same parts as where a thread trains, on tensors that are shared."""

    def __init__(self, setup: Setup, arena: Arena, connection: Connection) -> None:
        self._connection = connection
        dtypes = (torch.float32, torch.float32, setup.replica_dtype)
        training, anchor, replica = (SpecBlock(setup.config).to(dtype).eval().requires_grad_(False) for dtype in dtypes)
        embed = partial(embedding, weight=arena[EMBEDDING])
        rows = untrained_rows(anchor, None if setup.head is None else arena[setup.head])
        generator = torch.Generator().manual_seed(setup.seed)
        self._trainer = Trainer(training, anchor, embed, rows, rules=setup.rules, generator=generator)
        self._replica = replica
        self._replay: Replay = replay_of(embed)
        arena.lend(shared_tensors(self._trainer, training=training, anchor=anchor, replica=replica))

    def serve(self) -> None:
        while True:
            request = pickle.loads(self._connection.recv_bytes())
            began, result, error = time.process_time(), None, None
            try:
                result = self._answer(request)
            except (EOFError, OSError):
                raise
            except Exception:
                error = traceback.format_exc()
            self._connection.send_bytes(pickle.dumps(Done(result, error, time.process_time() - began)))

    def _answer(self, request: Train | Example) -> UpdateReport | float:
        if isinstance(request, Example):
            with torch.no_grad():
                return self._replay(self._replica, request)
        vocabulary, share = request.vocabulary, request.rate_share
        return self._trainer.update(
            request.arm, request.samples, self._interrupted, vocabulary=vocabulary, rate_share=share
        )

    def _interrupted(self) -> bool:
        self._connection.send_bytes(pickle.dumps(_INTERRUPTED))
        answer: bool = pickle.loads(self._connection.recv_bytes())
        return answer
