"""A stream of requests whose texts must stay plain, and a learner beside it that must go on, whatever strikes it.

Knows how a fault lies in wait for a random moment and how recovery is measured; which faults there are is described in
`tests/fault_kinds.py`.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from adaptation.feedback import FilteredQuery
from adaptation.learner import Learner
from adaptation.policy import Arm
from adaptation.publisher import Gate
from adaptation.records import Event
from drafters.feedback import QueryFeedback
from service.assembly import Assembly
from service.bench.driver import generate
from service.engine.requests import GenerationRequest
from service.learning.adaptive import Adaptive
from tests.drafters.network.parts import serves
from tests.practised import Practised, greedy_requests
from tests.service.learning_parts import learning, texts
from tests.tuned import settled

PATIENCE_ROUNDS = 80
SETTLE_SECONDS = 120.0
RECOVERY_SECONDS = 5.0
RECOVERY_TURNS = 3  # of the learning thread
_STEPS = 4  # of a round, among which a fault begins to lie in wait


@dataclass
class Strike:
    """Whether a fault has struck, and when, by several clocks."""

    struck: bool = False
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    turns: int = 0


Fault = Callable[[Strike], AbstractContextManager[None]]
"""Lies in wait while the context is open, and strikes once."""


@dataclass(frozen=True)
class Success:
    """Something that learning has done to its end."""

    what: str
    turns: int
    cpu_seconds: float
    wall_seconds: float


class Witness:
    """Stands between the learning thread and the learner, and notes what was done to its end."""

    def __init__(self, learner: Learner) -> None:
        self.turns = 0
        self.successes: list[Success] = []
        self._learner = learner
        self._num_updates = learner.training.num_updates.total()

    def observe(self, feedback: QueryFeedback) -> FilteredQuery:
        self.turns += 1
        taken = self._learner.observe(feedback)
        self._note("observe")
        return taken

    def forget(self, scope: str | None) -> None:
        self._learner.forget(scope)

    def work(self) -> bool:
        monitor = self._learner._publisher.monitor
        scores = bool(monitor.unscored) or monitor.scoring is not None
        works = self._learner.work()
        if works and not scores and self._learner._job is None:
            self.turns += 1
            before, self._num_updates = self._num_updates, self._learner.training.num_updates.total()
            self._note("update" if self._num_updates > before else "discard")
        return works

    def abandon(self) -> None:
        self._learner.abandon()

    def recover(self, error: str) -> None:
        self._learner.recover(error)

    def save(self, *, training: bool) -> None:
        self._learner.save(training=training)

    def note(self, strike: Strike) -> None:
        strike.cpu_seconds, strike.wall_seconds = time.process_time(), time.monotonic()
        strike.turns, strike.struck = self.turns, True

    def _note(self, what: str) -> None:
        self.successes.append(Success(what, self.turns, time.process_time(), time.monotonic()))


@dataclass(frozen=True)
class Recovery:
    """How long learning took to do something to its end again: turns of the learning thread and CPU seconds of the
    process, engine and all. Neither grows because others want the machine."""

    turns: int
    cpu_seconds: float


@dataclass
class Stream:
    """The same requests over and over, answered by an engine that learns."""

    adaptive: Adaptive
    arm: Arm
    witness: Witness
    asked: Sequence[GenerationRequest]
    plain: Sequence[tuple[int, ...]]
    rng: random.Random
    events: list[Event]
    recoveries: dict[str, list[Recovery]] = field(default_factory=dict)

    def round(self, before_step: Callable[[int], None] = lambda number: None) -> None:
        """Not one wrong token. Learning mostly goes on beside the next round."""
        run = generate(self.adaptive.engine, self.asked, before_step=before_step)
        assert [answer.token_ids for answer in run.answers] == self.plain
        if self.rng.random() < 0.3:
            self.settle()

    def settle(self) -> None:
        """Let learning catch up. A thread that has died is replaced at the next query only."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.adaptive.worker.alive and not settled(self.adaptive.worker, 0.05):
            assert time.monotonic() < deadline, "learning does not settle"
        self.adaptive.learner.training.time.skip_pause()  # so that training goes on beside the next round
        self.adaptive.engine.step()

    def survive(self, name: str, fault: Fault) -> Strike:
        """Let a fault lie in wait from a random step on; serve until it has struck and learning goes on."""
        strike, moment = Strike(), self.rng.randrange(_STEPS)
        with ExitStack() as traps:
            laid: list[None] = []

            def lay(number: int) -> None:
                if number == moment and not laid:
                    laid.append(traps.enter_context(fault(strike)))

            self.until(lambda: strike.struck, f"{name} never struck", lay)
        self.until(lambda: bool(self._since(strike, "update")), f"no update after {name}")
        self._measure(name, strike)
        return strike

    def until(
        self, done: Callable[[], bool], what: str, before_step: Callable[[int], None] = lambda number: None
    ) -> None:
        for _ in range(PATIENCE_ROUNDS):
            if done():
                return
            self.round(before_step)
        raise AssertionError(f"{what}: {self.events[-8:]}")

    def publish(self) -> None:
        """Serve until new weights have been published."""
        before = len(self.events)
        self.until(lambda: any(event.kind == "published" for event in self.events[before:]), "nothing published")

    def check(self) -> None:
        """Weights are still published, those that serve are those the learner knows, and no slot is lost."""
        self.publish()
        self.settle()
        adaptive = self.adaptive
        adaptive.engine.assert_conserved()
        assert adaptive.status().version == adaptive.learner.weights.version
        assert serves(adaptive.network, adaptive.learner.weights._served.weights)

    def reported(self) -> dict[str, float]:
        """How many faults of how many classes struck, and the longest that learning took to be back."""
        took = [one for every in self.recoveries.values() for one in every]
        return {
            "classes": len(self.recoveries),
            "strikes": len(took),
            "longest_turns": max(one.turns for one in took),
            "longest_cpu_seconds": round(max(one.cpu_seconds for one in took), 2),
        }

    def _since(self, strike: Strike, *kinds: str) -> list[Success]:
        return [one for one in self.witness.successes if one.what in kinds and one.wall_seconds > strike.wall_seconds]

    def _measure(self, name: str, strike: Strike) -> None:
        first = self._since(strike, "observe", "update")[0]
        took = Recovery(first.turns - strike.turns, first.cpu_seconds - strike.cpu_seconds)
        assert took.turns <= RECOVERY_TURNS, (name, took)
        assert took.cpu_seconds <= RECOVERY_SECONDS, (name, took)
        self.recoveries.setdefault(name, []).append(took)


@contextmanager
def learning_stream(
    practised: Practised, folder: Path, *, arm: Arm, seed: int, train_in: str = "auto"
) -> Iterator[Stream]:
    """Its gate is open: whatever was trained is published, so that every stage of an update is reached each time."""
    events: list[Event] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gate, "_reason", lambda *_: "better")
        with learning(
            practised.assembly,
            folder,
            events=events,
            policy=f"{arm}_only",
            head_steps=2,
            full_steps=1,
            step_texts=64,
            warm_up_steps=1,
            learning_rate=1e-3,
            snapshots=3,
            train_in=train_in,
        ) as adaptive:
            witness, asked = Witness(adaptive.learner), mixed_requests()
            adaptive.worker.loop = witness
            plain = plain_texts(practised.assembly, asked)
            yield Stream(adaptive, arm, witness, asked, plain, random.Random(seed), events)


def mixed_requests() -> list[GenerationRequest]:
    """Three that run together, one of them at temperature 1."""
    return [
        replace(one, sampling=replace(one.sampling, temperature=float(number % 2), max_tokens=8))
        for number, one in enumerate(greedy_requests(3))
    ]


def plain_texts(assembly: Assembly, asked: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
    return texts(assembly.engine(assembly.drafter("none")), asked)
