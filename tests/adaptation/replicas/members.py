"""Replicas in one process, whose turns a test takes one by one, around a real Redis server."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adaptation.learner import Learner
from adaptation.records import Event, ReplicaStatus
from adaptation.replicas.exchange import Exchange, join_replicas
from adaptation.replicas.redis_store import MAX_QUERIES
from adaptation.replicas.wire import QueryShape
from adaptation.weights import DrafterWeights
from adaptation.worker import Worker
from drafters.network.checkpoint import weights_of
from drafters.network.model import SpecBlock
from drafters.training.corpus import TOP
from tests.adaptation.samples import HIDDEN, bench, drafter, feedback, vocabulary
from tests.tiny_models import VOCAB_SIZE

TARGET = "a target"
SHAPE = QueryShape(
    width=3 * HIDDEN,
    hidden=HIDDEN,
    top=TOP,
    vocab=VOCAB_SIZE,
    most_tokens=64,
    dtype=torch.float32,
)
PATIENCE_SECONDS = 20.0
_EAGER: dict[str, object] = {
    "enabled": True,
    "policy": "full_only",
    "full_queries": 4,
    "full_steps": 6,
    "step_texts": 64,
    "warm_up_steps": 1,
    "learning_rate": 0.01,
    "train_in": "thread",
    "window_tokens": 63,
    "niceness": 0,
}


@dataclass
class Member:
    """One replica without an engine: its weights are written as soon as they wait."""

    learner: Learner
    weights: DrafterWeights
    worker: Worker
    exchange: Exchange
    serving: SpecBlock
    events: list[Event]

    @property
    def status(self) -> ReplicaStatus:
        return self.exchange.status()

    @property
    def served(self) -> dict[str, Tensor]:
        """What is really served."""
        return {name: value.clone() for name, value in weights_of(self.serving).items()}

    def bring(self, seed: int) -> None:
        """An operator brings other weights."""
        other = weights_of(drafter(seed))
        self.worker.ask(lambda: self.learner.adopt(other)).result(PATIENCE_SECONDS)

    def end(self, count: int, *, first_seed: int = 0) -> None:
        """So many queries end here, all of the same token again and again."""
        token = int(vocabulary()[0][5])
        for seed in range(first_seed, first_seed + count):
            self.exchange.offer(feedback(seed, token=token, version=self.weights.version))


@contextmanager
def member(
    folder: Path, url: str, *, lease_seconds: float = 6.0, max_queries: int = MAX_QUERIES, **knobs: object
) -> Iterator[Member]:
    """Its learning thread runs; the thread that talks to the others is the test."""
    made = bench(folder, **{**_EAGER, "redis_url": url, **knobs})
    worker, exchange = join_replicas(
        made.config,
        made.learner,
        made.drafter,
        made.tuning,
        target_identity=TARGET,
        lease_seconds=lease_seconds,
        max_queries=max_queries,
    )
    assert isinstance(exchange, Exchange)

    def write() -> None:
        made.weights.between_steps()

    made.weights.on_staged = write
    worker.start()
    try:
        yield Member(made.learner, made.weights, worker, exchange, made.serving, made.events)
    finally:
        assert worker.stop()


def until(members: Sequence[Member], done: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Take turns until it is so."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, [one.status for one in members]
        for one in members:
            one.exchange.attempt()
        time.sleep(0.01)


def agreed(members: Sequence[Member], sha256: str = "") -> bool:
    """All serve, and believe in, the same weights: these, if they are given."""
    reported = {one.status.served_sha256 for one in members} | {one.status.announced_sha256 for one in members}
    return len(reported) == 1 and (not sha256 or reported == {sha256})
