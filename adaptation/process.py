"""Updates and replays in a process of their own: threads share one interpreter, and a thread that trains makes every
operation of the thread that serves wait for it.

The weights lie in memory that both processes map, so that only samples and answers are sent. A process that dies costs
the update under way; the next request starts another one. Knows neither when to train nor what becomes of it.
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
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import embedding

from adaptation.arena import Arena, Places
from adaptation.evaluator import Replay, ReplayName, replay_of
from adaptation.policy import Arm
from adaptation.records import TrainingLost
from adaptation.samples import TrainingSample
from adaptation.trainer import Rules, Trainer, UpdateReport
from adaptation.vocabulary import untrained_rows
from drafters.specblock.config import SpecBlockConfig
from drafters.specblock.model import SpecBlock
from drafters.training.corpus import Example

EMBEDDING, HEAD = "embedding", "head"
"""Names of the target's tables in the arena; a tied head is the embedding."""
_ENDING_SECONDS = 5.0
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
    replay: ReplayName
    max_nodes: int
    seed: int
    threads: int
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
class Score:
    """Asks for the replay of a text with what the replica holds."""

    example: Example


@dataclass(frozen=True, slots=True)
class Whether:
    """Asks back, before each step, whether to break off."""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer; `error` is a traceback."""

    result: UpdateReport | float | None
    error: str | None
    seconds: float  # of computing


def _never() -> bool:
    return False


def _at_once() -> None:
    """Nobody holds it up."""


class TrainingProcess:
    """The other process, as the thread that learns sees it: one request at a time; what has died is started again."""

    def __init__(self, arena: Arena, setup: Setup) -> None:
        self.seconds = 0.0  # that it has computed
        self.num_started = 0
        self.before_asking: Callable[[], None] = _at_once
        self._arena = arena
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_asked = False
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

    def ask(self, request: Train | Score, interrupted: Callable[[], bool] = _never) -> UpdateReport | float:
        """Raises TrainingLost if the process dies over it, RuntimeError for what broke in it."""
        self.before_asking()
        self.quiet()
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it has died since, over nothing
        self.start()
        connection = self._connection
        assert connection is not None
        self._is_asked = True
        try:
            connection.send_bytes(pickle.dumps(request))
            while isinstance(answer := pickle.loads(connection.recv_bytes()), Whether):
                connection.send_bytes(pickle.dumps(interrupted()))
        except (EOFError, OSError) as error:
            self.close()
            raise TrainingLost("the process that trains has died") from error
        self._is_asked = False
        self.seconds += answer.seconds
        if answer.error is not None:
            raise RuntimeError(f"the process that trains has failed:\n{answer.error}")
        return cast(UpdateReport | float, answer.result)

    @property
    def is_asked(self) -> bool:
        """Whether somebody waits for its answer."""
        return self._is_asked

    def freeze(self) -> None:
        """Stop it where it is, until `thaw`; who waits for its answer waits on."""
        self._tell_system(signal.SIGSTOP)

    def thaw(self) -> None:
        self._tell_system(signal.SIGCONT)

    def quiet(self) -> None:
        """Let nothing compute on the shared weights: whoever asked last may have died before the answer."""
        if self._is_asked:
            self.close()

    def close(self) -> None:
        """End the process, at once if it does not end by itself. The next request starts another one."""
        with self._closing:
            process, connection = self._process, self._connection
            self._process = self._connection = None
            busy, self._is_asked = self._is_asked, False
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

    def _tell_system(self, word: signal.Signals) -> None:
        process = self._process
        if process is not None:
            process.send_signal(word)


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
        return cast(float, process.ask(Score(example)))

    return replay


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
        torch.set_num_threads(setup.threads)
        _Work(setup, Arena(arena, setup.places), connection).serve()
    except (EOFError, OSError):
        return


class _Work:
    """The same parts as in a process that trains by itself, on tensors that are shared."""

    def __init__(self, setup: Setup, arena: Arena, connection: Connection) -> None:
        self._connection = connection
        training, anchor, replica = (
            _model(setup.config, dtype) for dtype in (torch.float32, torch.float32, setup.replica_dtype)
        )
        embed = partial(_looked_up, arena[EMBEDDING])
        rows = untrained_rows(anchor, None if setup.head is None else arena[setup.head])
        generator = torch.Generator().manual_seed(setup.seed)
        self._trainer = Trainer(training, anchor, embed, rows, rules=setup.rules, generator=generator)
        self._replica = replica
        self._replay: Replay = replay_of(setup.replay, embed, max_nodes=setup.max_nodes)
        arena.lend(shared_tensors(self._trainer, training=training, anchor=anchor, replica=replica))

    def serve(self) -> None:
        while True:
            request = pickle.loads(self._connection.recv_bytes())
            began = time.process_time()
            result: UpdateReport | float | None = None
            error: str | None = None
            try:
                result = self._answer(request)
            except (EOFError, OSError):
                raise
            except Exception:
                error = traceback.format_exc()
            self._connection.send_bytes(pickle.dumps(Done(result, error, time.process_time() - began)))

    def _answer(self, request: Train | Score) -> UpdateReport | float:
        if isinstance(request, Score):
            with torch.no_grad():
                return self._replay(self._replica, request.example)
        return self._trainer.update(
            request.arm,
            request.samples,
            self._interrupted,
            vocabulary=request.vocabulary,
            rate_share=request.rate_share,
        )

    def _interrupted(self) -> bool:
        self._connection.send_bytes(pickle.dumps(Whether()))
        answer: bool = pickle.loads(self._connection.recv_bytes())
        return answer


def _looked_up(table: Tensor, tokens: Tensor) -> Tensor:
    return embedding(tokens, table)


def _model(config: SpecBlockConfig, dtype: torch.dtype) -> SpecBlock:
    return SpecBlock(config).to(dtype).eval().requires_grad_(False)
