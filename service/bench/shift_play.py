"""The stream of a shift benchmark in turns, and policies that take them, each learning in its own turns only."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, groupby, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event as Signal
from typing import Final

from adaptation.config import PolicyName, Tuning
from adaptation.records import Event
from adaptation.trainer import UpdateReport
from drafters.feedback import QueryFeedback
from drafters.regret import RegretLedger
from service.assembly import Assembly
from service.bench.driver import ClosedLoop, Drive, Run
from service.bench.experiment import Measure, counted, request_of, tau
from service.engine.engine import Engine, StepReport
from service.engine.requests import GenerationRequest, SamplingParams
from service.errors import StartupError
from service.learning.adaptive import Adaptive, build_adaptive
from service.prompts import PromptSet

PLAIN: Final = "never"
"""The policy all others are compared with."""

_PATIENCE_SECONDS = 900.0
_GLANCE_SECONDS = 0.002
_WARM_UP_TOKENS = 16
_WINDOWS = 24  # of the whole stream, about: enough to see a course, few enough that each says something

Prompt = tuple[int, ...]

Counts = Mapping[str, float]
"""What learning has done, by name."""

NOTHING: Final[Counts] = {
    **{"training_seconds": 0.0, "updates_head": 0, "updates_full": 0, "publishes": 0, "refusals": 0, "rollbacks": 0},
    **{"discards": 0, "over_share": 0},  # queries not learnt from because their client had had its quota
}


@dataclass(frozen=True, slots=True)
class Noted:
    """An event, and after how many of the policy's queries it came."""

    query: int
    event: Event


class Notes:
    """Takes down events, told by the thread that learns."""

    def __init__(self) -> None:
        self.answered = 0  # queries of the stream
        self._noted: list[Noted] = []

    def note(self, event: Event) -> None:
        self._noted.append(Noted(self.answered, event))

    def take(self) -> tuple[Noted, ...]:
        """What was noted since the last call."""
        noted, self._noted = self._noted, []
        return tuple(noted)


class Learning:
    """What the learning thread of an engine runs from now on: its learning, held still between turns."""

    def __init__(self, adaptive: Adaptive) -> None:
        self._adaptive = adaptive
        self._loop = adaptive.worker.loop
        self.recover, self.save = self._loop.recover, self._loop.save
        self._process = adaptive.learner.training.process
        self._free, self._standing = Signal(), Signal()
        self._free.set()
        adaptive.worker.loop = self
        if self._process is not None:
            self._process.before_asking = self.stand
        adaptive.start()
        self.hold()

    def go_on(self) -> None:
        """A turn begins."""
        self._standing.clear()
        self._free.set()
        if self._process is not None:
            self._process.thaw()

    def hold(self) -> None:
        """Wait for the step under way; another process is stopped at once. Raises StartupError. Once per `go_on`."""
        asked = self._adaptive.worker.ask(lambda: None)  # an idle thread looks for what is due twice a second only
        self._free.clear()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (self._freezes_process() or self._standing.wait(_GLANCE_SECONDS)):
            if time.monotonic() > deadline:
                raise StartupError(f"learning does not stand still after {_PATIENCE_SECONDS:.0f} s; the log says why")
        asked.cancel()

    def counts(self) -> Counts:
        """What was done so far; to be asked while it is held."""
        status = self._adaptive.learner.status(self._adaptive.worker)  # not by the thread: it stands
        return {
            **{name: getattr(status, name, 0) for name in NOTHING},
            "updates_head": status.updates.get("head", 0),
            "updates_full": status.updates.get("full", 0),
            "over_share": status.excluded.get("over_share", 0),
        }

    def close(self) -> None:
        self.go_on()
        self._adaptive.stop()

    def observe(self, feedback: QueryFeedback) -> object:
        self.stand()
        return self._loop.observe(feedback)

    def update(self, interrupted: Callable[[], bool]) -> UpdateReport | None:
        """Stands still before it and between its steps."""
        self.stand()

        def passed() -> bool:
            self.stand()
            return interrupted()

        return self._loop.update(passed)

    def stand(self) -> None:
        """Wait until nobody holds it."""
        while not self._free.is_set():
            self._standing.set()
            self._free.wait()

    def _freezes_process(self) -> bool:
        """Stop the process amid what it does; whether the thread waits for that."""
        if self._process is None or not self._process.is_asked:
            return False
        self._process.freeze()
        return True


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the stream over which traffic does not change."""

    name: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """All phases, and the first query of the stretch in which there is something new to learn."""

    phases: tuple[Phase, ...]
    new_from: int

    @property
    def num_queries(self) -> int:
        return sum(len(phase.prompts) for phase in self.phases)


@dataclass(frozen=True, slots=True)
class Turn:
    """Queries that a policy answers in one go. Neither turns nor windows reach over the end of a phase."""

    phase: int
    window: int
    first: int  # number of its first query
    requests: tuple[GenerationRequest, ...]


def shifted(before: Sequence[PromptSet], after: Sequence[PromptSet], queries: int, seed: int) -> Stream:
    """One half of these, then the other half of those. Raises StartupError where there are too few prompts."""
    first = Phase(_name(before), mixed(before, queries // 2, random.Random(seed)))
    second = Phase(_name(after), mixed(after, queries - queries // 2, random.Random(seed + 1)))
    return Stream((first, second), new_from=queries // 2)


def repeated(sets: Sequence[PromptSet], queries: int, epochs: int, seed: int) -> Stream:
    """One mix of all sets, so many times over, `queries` in all. Raises StartupError where prompts are missing."""
    if queries % epochs:
        raise StartupError(f"--queries {queries} cannot be cut into {epochs} equal epochs: give a multiple of --epochs")
    prompts = mixed(sets, queries // epochs, random.Random(seed))
    return Stream(tuple(Phase(f"epoch {epoch + 1}", prompts) for epoch in range(epochs)), new_from=0)


def mixed(sets: Sequence[PromptSet], count: int, rng: random.Random) -> tuple[Prompt, ...]:
    """So many prompts, equally many of each set while it lasts, in an order of chance. Raises StartupError."""
    shuffled = [rng.sample(chosen.prompts, len(chosen.prompts)) for chosen in sets]
    dealt = [prompt for prompt in chain.from_iterable(zip_longest(*shuffled)) if prompt is not None][:count]
    if len(dealt) < count:
        raise StartupError(f"{_name(sets)}: {count} prompts are needed and there are {len(dealt)}; lower --queries")
    return tuple(rng.sample(dealt, count))


def _name(sets: Sequence[PromptSet]) -> str:
    return " + ".join(chosen.name for chosen in sets)


def turns_of(stream: Stream, size: int, measure: Measure) -> list[Turn]:
    """The whole stream in turns of up to `size` queries, whose answers may end by themselves, as in traffic."""
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
    """What one policy did in one turn, or in several in a row."""

    turn: Turn
    run: Run
    net_seconds: float  # until learning stood still
    counts: Counts
    noted: tuple[Noted, ...] = ()

    @property
    def tau(self) -> float:
        return tau([self.run])

    @property
    def net_speed(self) -> float:
        """Tokens per second, training included."""
        return self.run.num_tokens / self.net_seconds

    @property
    def engine_speed(self) -> float:
        """Tokens per second until the last answer of each turn."""
        return self.run.num_tokens / self.run.seconds


def joined(turns: Sequence[Played]) -> Played:
    """Turns in a row as one."""
    return Played(
        replace(turns[0].turn, requests=tuple(chain.from_iterable(one.turn.requests for one in turns))),
        Run(
            tuple(chain.from_iterable(one.run.answers for one in turns)),
            tuple(chain.from_iterable(one.run.steps for one in turns)),
            sum(one.run.seconds for one in turns),
        ),
        sum(one.net_seconds for one in turns),
        {name: sum(one.counts[name] for one in turns) for name in NOTHING},
        tuple(chain.from_iterable(one.noted for one in turns)),
    )


def windows_of(played: Sequence[Played]) -> list[Played]:
    """A policy's turns, window by window."""
    return [joined(list(turns)) for _, turns in groupby(played, lambda one: one.turn.window)]


class Player:
    """One policy: its engine, and who learns beside it."""

    def __init__(self, name: str, engine: Engine, learning: Learning | None = None, notes: Notes | None = None) -> None:
        self.name = name
        self._engine = engine
        self._learning = learning
        self._notes = notes or Notes()
        self._counts = NOTHING

    def warm_up(self, prompt: Sequence[int]) -> None:
        """One answer that nobody measures or learns from: first calls allocate and choose code paths."""
        sampling = SamplingParams(seed=0, max_tokens=_WARM_UP_TOKENS, temperature=0.0)
        request = GenerationRequest(request_id="warm-up", prompt=prompt, sampling=sampling, store=False)
        self.play(Turn(0, 0, 0, (request,)), 1)
        self._notes.answered = 0

    def play(self, turn: Turn, concurrency: int, pause_seconds: float = 0.0) -> Played:
        """Answer the turn's queries, so many at a time, and learn meanwhile and in the pause behind them, which is not
        counted."""
        drive = Drive(self._engine, turn.requests, ClosedLoop(concurrency), after_step=self._count)
        began, before = time.perf_counter(), self._counts
        if self._learning is not None:
            self._learning.go_on()
        drive.go_on()
        if self._learning is not None:
            time.sleep(pause_seconds)
            began += pause_seconds
            self._learning.hold()
        net_seconds = time.perf_counter() - began
        if self._learning is not None:
            self._counts = self._learning.counts()
        done = {name: self._counts[name] - before[name] for name in NOTHING}
        return Played(turn, drive.result(), net_seconds, done, self._notes.take())

    def _count(self, report: StepReport) -> None:
        self._notes.answered += len(report.finished)


@contextmanager
def players_of(
    assembly: Assembly, policies: Mapping[str, PolicyName], seed: int, keep: Path | None = None
) -> Iterator[list[Player]]:
    """One engine for each name, with that policy, all starting from the same weights and from nothing learnt; what they
    learn stays in the folder `keep`, by name."""
    plain = "memory" if assembly.loaded.unmade is not None else assembly.drafter_name
    with ExitStack() as closing:
        folder = keep or closing.enter_context(TemporaryDirectory(prefix="adaptree-bench-"))
        players = []
        for name, policy in policies.items():
            if policy == PLAIN:
                ledger = RegretLedger()
                players.append(Player(name, assembly.engine(assembly.drafter(plain, ledger=ledger), ledger=ledger)))
                continue
            notes = Notes()
            config = assembly.config.adaptation.model_copy(update={"policy": policy})
            adaptive = build_adaptive(
                assembly, config, folder=Path(folder) / name, emit=notes.note, tuning=Tuning(seed=seed)
            )
            learning = Learning(adaptive)
            closing.callback(learning.close)
            players.append(Player(name, adaptive.engine, learning, notes))
        yield players


def play_all(
    players: Sequence[Player], turns: Mapping[str, Sequence[Turn]], measure: Measure, pause_seconds: float = 0.0
) -> dict[str, list[Played]]:
    """Every player's turns, by its name, equally many for all, after an answer that nobody measures."""
    for player in players:
        player.warm_up(turns[player.name][0].requests[0].prompt)
    played: dict[str, list[Played]] = {player.name: [] for player in players}
    rng = random.Random(measure.seed)
    with counted(sum(len(turn.requests) for mine in turns.values() for turn in mine), "queries") as advance:
        for together in zip(*(turns[player.name] for player in players), strict=True):
            pairs = list(zip(players, together, strict=True))
            for player, turn in rng.sample(pairs, len(pairs)):
                played[player.name].append(player.play(turn, measure.concurrency, pause_seconds))
                advance(len(turn.requests))
    return played
