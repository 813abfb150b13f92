"""The process that trains: builds a trainer around shared weights, and does what it is asked until nobody asks."""

import os
import pickle
import time
import traceback
from functools import partial
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch.nn.functional import embedding

from adaptation.arena import Arena
from adaptation.judging import Replay, replay_of
from adaptation.process import EMBEDDING, Done, Score, Setup, Train, Whether, shared_tensors
from adaptation.trainer import Trainer, UpdateReport
from adaptation.vocabulary import untrained_rows
from drafters.specblock.config import SpecBlockConfig
from drafters.specblock.model import SpecBlock


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
            request.lessons,
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
