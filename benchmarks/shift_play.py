"""A stream of queries in turns, and policies that answer them, each learning in its own turns only."""

import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event as Signal
from typing import Final

from adaptation.config import Tuning
from adaptation.records import Event
from benchmarks.policies import PolicyName, fixed_policy
from benchmarks.shared import Prompt, mixed
from drafters.decision import RegretLedger
from drafters.feedback import QueryFeedback
from service.assembly import Assembly
from service.bench.driver import ClosedLoop, Drive, Run
from service.bench.experiment import Measure, counted, request_of, tau
from service.engine.engine import Engine, EngineOutput
from service.engine.requests import GenerationRequest, SamplingParams
from service.errors import StartupError
from service.learning.adaptive import Adaptive, build_adaptive
from service.text.prompts import PromptSet

PLAIN: Final = "never"
"""The policy that all others are compared with."""

_PATIENCE_SECONDS = 900.0
_WARM_UP_TOKENS = 16
_WINDOWS = 24  # of the whole stream, about

Counts = Mapping[str, float]
"""What learning did, by name."""

NOTHING: Final[Counts] = {
    **{"training_seconds": 0.0, "updates_head": 0, "updates_full": 0, "publishes": 0, "refusals": 0, "rollbacks": 0},
    **{"discards": 0, "over_share": 0},  # queries beyond a client's quota, which are not learnt from
}


@dataclass(frozen=True, slots=True)
class Noted:
    """An event of learning, after so many of the policy's queries."""

    query: int
    event: Event


class Notes:
    """Collects events of the learning thread."""

    def __init__(self) -> None:
        self.answered = 0  # queries of the stream
        self._noted: list[Noted] = []

    def note(self, event: Event) -> None:
        """Keep an event."""
        self._noted.append(Noted(self.answered, event))

    def take(self) -> tuple[Noted, ...]:
        """Return the events since the last call."""
        noted, self._noted = self._noted, []
        return tuple(noted)


class Learning:
    """Wraps the loop of an engine's learning thread, so that it stands still between turns: a thread after the piece
    under way, a training process where it is."""

    def __init__(self, adaptive: Adaptive) -> None:
        self._adaptive = adaptive
        self._loop = adaptive.worker.loop
        self.recover, self.save, self.abandon = self._loop.recover, self._loop.save, self._loop.abandon
        self.forget = self._loop.forget
        self._process = adaptive.learner.training.process
        self._free, self._standing = Signal(), Signal()
        self._free.set()
        adaptive.worker.loop = self
        adaptive.start()
        self.hold()

    def go_on(self) -> None:
        """Let learning run."""
        if self._process is not None:
            self._process.brake.go_on()
        self._adaptive.learner.training.time.skip_pause()
        self._standing.clear()
        self._free.set()

    def hold(self) -> None:
        """Stop learning. Raises StartupError if it goes on."""
        asked = self._adaptive.worker.ask(lambda: None)  # wakes an idle thread
        self._free.clear()
        if not self._standing.wait(_PATIENCE_SECONDS):
            raise StartupError(f"learning does not stand still after {_PATIENCE_SECONDS:.0f} s; the log says why")
        if self._process is not None:
            self._process.brake.stop()
        asked.cancel()

    def counts(self) -> Counts:
        """Return what was done so far. Only while held."""
        status = self._adaptive.learner.status(self._adaptive.worker)  # the thread itself stands still
        return {
            **{name: getattr(status, name, 0) for name in NOTHING},
            "updates_head": status.updates.get("head", 0),
            "updates_full": status.updates.get("full", 0),
            "over_share": status.excluded.get("over_share", 0),
        }

    def close(self) -> None:
        """End learning."""
        self.go_on()
        self._adaptive.stop()

    def observe(self, feedback: QueryFeedback) -> object:
        """Learn from a query, once not held."""
        self.stand()
        return self._loop.observe(feedback)

    def work(self) -> bool:
        """Do the next piece of an update, once not held."""
        self.stand()
        return self._loop.work()

    def stand(self) -> None:
        """Wait while held."""
        while not self._free.is_set():
            self._standing.set()
            self._free.wait()


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the stream without a change of traffic."""

    name: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """All phases, and the first query after which there is something new to learn."""

    phases: tuple[Phase, ...]
    new_from: int

    @property
    def num_queries(self) -> int:
        """Queries of all phases."""
        return sum(len(phase.prompts) for phase in self.phases)


@dataclass(frozen=True, slots=True)
class Turn:
    """Queries that a policy answers in one go. Turns and windows end with their phase."""

    phase: int
    window: int
    first: int  # number of its first query
    requests: tuple[GenerationRequest, ...]


def shifted(before: Sequence[PromptSet], after: Sequence[PromptSet], queries: int, seed: int) -> Stream:
    """Return half the queries from `before`, then half from `after`. Raises StartupError for too few prompts."""
    first = Phase(_name(before), mixed(before, queries // 2, random.Random(seed)))
    second = Phase(_name(after), mixed(after, queries - queries // 2, random.Random(seed + 1)))
    return Stream((first, second), new_from=queries // 2)


def repeated(sets: Sequence[PromptSet], queries: int, epochs: int, seed: int) -> Stream:
    """Return one mix of all sets, repeated; `queries` counts all epochs. Raises StartupError for too few prompts."""
    if queries % epochs:
        raise StartupError(f"--queries {queries} cannot be cut into {epochs} equal epochs: give a multiple of --epochs")
    prompts = mixed(sets, queries // epochs, random.Random(seed))
    return Stream(tuple(Phase(f"epoch {epoch + 1}", prompts) for epoch in range(epochs)), new_from=0)


def _name(sets: Sequence[PromptSet]) -> str:
    return " + ".join(chosen.name for chosen in sets)


def turns_of(stream: Stream, size: int, measure: Measure) -> list[Turn]:
    """Cut the stream into turns of up to `size` queries, whose answers end by themselves as in real traffic."""
    total = sum(-(-len(phase.prompts) // size) for phase in stream.phases)
    per_window = max(1, round(total / _WINDOWS))
    turns: list[Turn] = []
    first = window = 0
    for index, phase in enumerate(stream.phases):
        starts = range(0, len(phase.prompts), size)
        windows = max(1, len(starts) // per_window)
        for place, start in enumerate(starts):
            prompts = enumerate(phase.prompts[start : start + size], first + start)
            requests = tuple(request_of(number, prompt, measure, ignore_eos=False) for number, prompt in prompts)
            turns.append(Turn(index, window + min(place // per_window, windows - 1), first + start, requests))
        first += len(phase.prompts)
        window += windows
    return turns


@dataclass(frozen=True, slots=True)
class Played:
    """What one policy did in one turn, or in several consecutive ones."""

    turn: Turn
    run: Run
    counts: Counts
    noted: tuple[Noted, ...] = ()

    @property
    def tau(self) -> float:
        """Mean emitted tokens per verify."""
        return tau([self.run])

    @property
    def seconds(self) -> float:
        """Seconds of service, in which a step ran."""
        return sum(step.seconds for step in self.run.steps)

    @property
    def speed(self) -> float:
        """Tokens per second of service."""
        return self.run.num_tokens / self.seconds


def joined(turns: Sequence[Played]) -> Played:
    """Join consecutive turns."""
    return Played(
        replace(turns[0].turn, requests=tuple(chain.from_iterable(one.turn.requests for one in turns))),
        Run(
            tuple(chain.from_iterable(one.run.answers for one in turns)),
            tuple(chain.from_iterable(one.run.steps for one in turns)),
            sum(one.run.seconds for one in turns),
        ),
        {name: sum(one.counts[name] for one in turns) for name in NOTHING},
        tuple(chain.from_iterable(one.noted for one in turns)),
    )


def windows_of(played: Sequence[Played]) -> list[Played]:
    """Join a policy's turns by window."""
    return [joined(list(turns)) for _, turns in groupby(played, lambda one: one.turn.window)]


class Player:
    """One policy: an engine, and its learning if it has any."""

    def __init__(self, name: str, engine: Engine, learning: Learning | None = None, notes: Notes | None = None) -> None:
        self.name = name
        self._engine = engine
        self._learning = learning
        self._notes = notes or Notes()
        self._counts = NOTHING

    def warm_up(self, prompt: Sequence[int]) -> None:
        """Answer once without measuring or learning: first calls allocate and choose code paths."""
        sampling = SamplingParams(seed=0, max_tokens=_WARM_UP_TOKENS, temperature=0.0)
        request = GenerationRequest(request_id="warm-up", prompt=prompt, sampling=sampling, store=False)
        self.play(Turn(0, 0, 0, (request,)), ClosedLoop(1))
        self._notes.answered = 0

    def play(self, turn: Turn, arrivals: ClosedLoop) -> Played:
        """Answer a turn's queries while learning runs, between them too."""
        drive = Drive(self._engine, turn.requests, arrivals, after_step=self._count)
        before = self._counts
        if self._learning is not None:
            self._learning.go_on()
        drive.go_on()
        if self._learning is not None:
            self._learning.hold()
            self._counts = self._learning.counts()
        done = {name: self._counts[name] - before[name] for name in NOTHING}
        return Played(turn, drive.result(), done, self._notes.take())

    def _count(self, report: EngineOutput) -> None:
        self._notes.answered += len(report.finished)


@contextmanager
def players_of(
    assembly: Assembly, policies: Mapping[str, PolicyName], seed: int, keep: Path | None = None
) -> Iterator[list[Player]]:
    """Yield one player per name, with that policy; all start from the same weights. `keep` is the folder for what they
    learn, by name."""
    plain = "memory" if assembly.loaded.initial_drafter is not None else assembly.drafter_name
    with ExitStack() as closing:
        folder = keep or closing.enter_context(TemporaryDirectory(prefix="adaptree-bench-"))
        players = []
        for name, policy in policies.items():
            if policy == PLAIN:
                ledger = RegretLedger()
                players.append(Player(name, assembly.engine(assembly.drafter(plain, ledger=ledger), ledger=ledger)))
                continue
            notes, tuning = Notes(), Tuning(seed=seed)
            fixed = None if policy == "bandit" else fixed_policy(policy, tuning)
            adaptive = build_adaptive(
                assembly, folder=Path(folder) / name, emit=notes.note, tuning=tuning, policy=fixed
            )
            learning = Learning(adaptive)
            closing.callback(learning.close)
            players.append(Player(name, adaptive.engine, learning, notes))
        yield players


class PoissonArrivals(ClosedLoop):
    """Requests at independent random times, at a mean rate."""

    def __init__(self, rate_per_second: float, count: int, *, seed: int) -> None:
        rng = random.Random(seed)
        self._times = list(accumulate(rng.expovariate(rate_per_second) for _ in range(count)))

    def due(self, elapsed_seconds: float, finished: int) -> int:
        """Requests that should have been sent by now."""
        return bisect_right(self._times, elapsed_seconds)

    def is_steady(self, finished: int, total: int) -> bool:
        """Whether the load is steady: always."""
        return True

    def since(self, number: int, elapsed_seconds: float) -> float:
        """When request `number` arrives."""
        return self._times[number]


def play_all(
    players: Sequence[Player], turns: Mapping[str, Sequence[Turn]], measure: Measure, load: float | None = None
) -> dict[str, list[Played]]:
    """Warm the players up and let them take their turns, in a random order each time; return the turns by name.
    `load`: share of the time in which the plain engine is busy, with Poisson arrivals; None: clients never pause."""
    for player in players:
        player.warm_up(turns[player.name][0].requests[0].prompt)
    played: dict[str, list[Played]] = {player.name: [] for player in players}
    rng, plain = random.Random(measure.seed), next((one for one in players if one.name == PLAIN), players[0])
    with counted(sum(len(turn.requests) for mine in turns.values() for turn in mine), "queries") as advance:
        for together in zip(*(turns[player.name] for player in players), strict=True):
            pairs = list(zip(players, together, strict=True))
            for player, turn in rng.sample(pairs, len(pairs)):
                arrivals = ClosedLoop(measure.concurrency)
                if load is not None and (known := played[plain.name]):
                    rate = load * sum(len(one.turn.requests) for one in known) / sum(one.seconds for one in known)
                    arrivals = PoissonArrivals(rate, len(turn.requests), seed=turn.first)
                played[player.name].append(player.play(turn, arrivals))
                advance(len(turn.requests))
    return played
