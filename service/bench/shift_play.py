"""The stream of a shift benchmark in turns, and policies that take them, each learning in its own turns only."""

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event as Signal
from threading import Lock
from typing import Final, Protocol

from adaptation.config import PolicyName, Tuning
from adaptation.records import AdaptationStatus, Event
from adaptation.trainer import UpdateReport
from drafters.feedback import QueryFeedback
from service.assembly import Assembly
from service.bench.experiment import Measure
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams, SequenceOutput
from service.errors import StartupError
from service.learning.adaptive import Adaptive, build_adaptive
from service.logging import counting
from service.prompts import PromptSet

PLAIN: Final = "never"
"""The policy all others are compared with."""

_PATIENCE_SECONDS = 900.0
_GLANCE_SECONDS = 0.002
_WARM_UP_TOKENS = 16
_WINDOWS = 24  # of the whole stream, about: enough to see a course, few enough that each says something

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What learning has done."""

    training_seconds: float = 0.0
    updates_head: int = 0
    updates_full: int = 0
    publishes: int = 0
    refusals: int = 0
    rollbacks: int = 0
    discards: int = 0
    over_share: int = 0  # queries not learnt from because their client had had its quota

    @staticmethod
    def of(status: AdaptationStatus) -> "Counts":
        return Counts(
            training_seconds=status.training_seconds,
            updates_head=status.updates.get("head", 0),
            updates_full=status.updates.get("full", 0),
            publishes=status.publishes,
            refusals=status.refusals,
            rollbacks=status.rollbacks,
            discards=status.discards,
            over_share=status.excluded.get("over_share", 0),
        )

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(**{field.name: getattr(self, field.name) - getattr(other, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True)
class Noted:
    """An event, and after how many of the policy's queries it came."""

    query: int
    event: Event


class Notes:
    """Takes down events, told by any thread."""

    def __init__(self) -> None:
        self.answered = 0  # queries of the stream
        self._noted: list[Noted] = []
        self._lock = Lock()

    def clear(self) -> None:
        """Begin anew."""
        self.take()
        self.answered = 0

    def note(self, event: Event) -> None:
        with self._lock:
            self._noted.append(Noted(self.answered, event))

    def take(self) -> tuple[Noted, ...]:
        """What was noted since the last call."""
        with self._lock:
            noted, self._noted = tuple(self._noted), []
        return noted


class Beside(Protocol):
    """What goes on beside an engine during its turns, and only then."""

    def go_on(self) -> None:
        """A turn begins."""
        ...

    def hold(self) -> None:
        """The turn is over: do nothing until the next one."""
        ...

    def counts(self) -> Counts:
        """What was done so far; to be asked while it is held."""
        ...

    def close(self) -> None: ...


class Nobody:
    """Nobody learns: the plain comparison."""

    def go_on(self) -> None:
        """Nothing was held."""

    def hold(self) -> None:
        """Nothing goes on."""

    def counts(self) -> Counts:
        return Counts()

    def close(self) -> None:
        """Nothing was started."""


class Learning:
    """The learning thread of an engine that learns while it serves, held still between turns. It takes the engine's
    learning over for good: it is what that thread runs.
    """

    def __init__(self, adaptive: Adaptive) -> None:
        self._adaptive = adaptive
        self._loop = adaptive.worker.loop
        self._process = adaptive.learner.process
        self._free, self._standing = Signal(), Signal()
        self._free.set()
        adaptive.worker.loop = self
        if self._process is not None:
            self._process.before_asking = self.stand
        adaptive.start()
        self.hold()

    def go_on(self) -> None:
        self._standing.clear()
        self._free.set()
        if self._process is not None:
            self._process.thaw()

    def hold(self) -> None:
        """Waits for the step or the replay that is under way, unless another process does it: that one is stopped at
        once. Raises StartupError. Not to be called twice without `go_on`."""
        asked = self._adaptive.worker.ask(lambda: None)  # an idle thread looks for what is due twice a second only
        self._free.clear()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (self._freezes_process() or self._standing.wait(_GLANCE_SECONDS)):
            if time.monotonic() > deadline:
                raise StartupError(f"learning does not stand still after {_PATIENCE_SECONDS:.0f} s; the log says why")
        asked.cancel()

    def counts(self) -> Counts:
        return Counts.of(self._adaptive.learner.status(self._adaptive.worker))  # not by the thread: it stands

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

    def recover(self, error: str) -> None:
        self._loop.recover(error)

    def save(self, *, training: bool) -> None:
        self._loop.save(training=training)

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
class AskedQuery:
    """One query of a stream."""

    number: int  # its seed follows from it
    prompt: Prompt
    client: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """Queries that a policy answers in one go. Neither turns nor windows reach over the end of a phase."""

    number: int
    phase: int
    window: int
    first: int  # number of its first query
    queries: tuple[AskedQuery, ...]

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return tuple(query.prompt for query in self.queries)


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


def turns_of(stream: Stream, size: int) -> list[Turn]:
    """The whole stream in turns of `size` queries; the last turn of a phase may be shorter."""
    total = sum(-(-len(phase.prompts) // size) for phase in stream.phases)
    per_window = max(1, round(total / _WINDOWS))
    turns: list[Turn] = []
    first = window = 0
    for index, phase in enumerate(stream.phases):
        pieces = list(_pieces(phase.prompts, size))
        windows = max(1, len(pieces) // per_window)
        for place, prompts in enumerate(pieces):
            mine = window + min(place // per_window, windows - 1)
            queries = tuple(AskedQuery(number, prompt) for number, prompt in enumerate(prompts, start=first))
            turns.append(Turn(len(turns), index, mine, first, queries))
            first += len(prompts)
        window += windows
    return turns


def _name(sets: Sequence[PromptSet]) -> str:
    return " + ".join(chosen.name for chosen in sets)


def _pieces(prompts: tuple[Prompt, ...], size: int) -> Iterator[tuple[Prompt, ...]]:
    return (prompts[start : start + size] for start in range(0, len(prompts), size))


@dataclass(frozen=True, slots=True)
class AnsweredQuery:
    """One answer and what speculation did for it."""

    token_ids: tuple[int, ...]
    accepted: int  # drafted tokens, in all its verifies
    verifies: int


@dataclass(frozen=True, slots=True)
class Played:
    """What one policy did in one turn."""

    turn: Turn
    queries: tuple[AnsweredQuery, ...]
    gaps: tuple[float, ...]  # seconds between outputs of a sequence
    engine_seconds: float
    net_seconds: float
    counts: Counts
    noted: tuple[Noted, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(query.token_ids) for query in self.queries)


class Player:
    """One policy: its engine, and who learns beside it."""

    def __init__(self, name: str, engine: Engine, beside: Beside, notes: Notes) -> None:
        self.name = name
        self._engine = engine
        self._beside = beside
        self._notes = notes
        self._counts = Counts()

    def warm_up(self, prompt: Prompt) -> None:
        """One answer that nobody measures or learns from: first calls allocate and choose code paths."""
        measure = Measure(temperature=0.0, max_tokens=_WARM_UP_TOKENS, concurrency=1, seed=0)
        self._beside.go_on()
        self._serve([_request(AskedQuery(0, prompt), measure, store=False)], 1)
        self._beside.hold()
        self._counts = self._beside.counts()
        self._notes.clear()

    def play(self, turn: Turn, measure: Measure) -> Played:
        """Answer the turn's queries, `measure.concurrency` at a time, and learn meanwhile."""
        requests = [_request(query, measure) for query in turn.queries]
        began = time.perf_counter()
        self._beside.go_on()
        queries, gaps = self._serve(requests, measure.concurrency)
        served = time.perf_counter()
        self._beside.hold()
        held = time.perf_counter()
        before, self._counts = self._counts, self._beside.counts()
        return Played(turn, queries, gaps, served - began, held - began, self._counts - before, self._notes.take())

    def close(self) -> None:
        self._beside.close()

    def _serve(
        self, requests: Sequence[GenerationRequest], concurrency: int
    ) -> tuple[tuple[AnsweredQuery, ...], tuple[float, ...]]:
        """Keep so many of the requests in flight until all are answered."""
        waiting = deque(requests)
        outputs: defaultdict[str, list[SequenceOutput]] = defaultdict(list)
        gaps: list[float] = []
        in_flight = 0
        while waiting or in_flight:
            while waiting and in_flight < concurrency:
                self._engine.add(waiting.popleft())
                in_flight += 1
            report = self._engine.step()
            for output in report.outputs:
                outputs[output.request_id].append(output)
            in_flight -= len(report.finished)
            self._notes.answered += len(report.finished)
            if report.stats is not None:
                gaps += report.stats.itl_seconds
        return tuple(_answered(outputs[request.request_id]) for request in requests), tuple(gaps)


def play_all(
    players: Sequence[Player],
    turns: Mapping[str, Sequence[Turn]],
    measure: Measure,
    advance: Callable[[str, int], None] = lambda player, queries: None,
) -> dict[str, list[Played]]:
    """Every player's turns, by its name, equally many for all. `advance` hears of queries as they are done."""
    played: dict[str, list[Played]] = {player.name: [] for player in players}
    rng = random.Random(measure.seed)
    for together in zip(*(turns[player.name] for player in players), strict=True):
        pairs = list(zip(players, together, strict=True))
        for player, turn in rng.sample(pairs, len(pairs)):
            played[player.name].append(player.play(turn, measure))
            advance(player.name, len(turn.queries))
    return played


def _request(query: AskedQuery, measure: Measure, *, store: bool = True) -> GenerationRequest:
    """Unlike other benchmarks this one lets answers end by themselves: what follows an end is nobody's traffic."""
    return GenerationRequest(
        request_id=f"query-{query.number}",
        prompt=query.prompt,
        sampling=SamplingParams(
            seed=measure.seed + query.number, max_tokens=measure.max_tokens, temperature=measure.temperature
        ),
        store=store,
        client=query.client,
    )


def _answered(outputs: Sequence[SequenceOutput]) -> AnsweredQuery:
    speculation = outputs[-1].speculation
    accepted = speculation.accepted_per_step if speculation else ()
    return AnsweredQuery(tuple(token for output in outputs for token in output.token_ids), sum(accepted), len(accepted))


@contextmanager
def players_of(assembly: Assembly, policies: Mapping[str, PolicyName], seed: int) -> Iterator[list[Player]]:
    """One engine for each name, with that policy, all starting from the same weights and from nothing learnt."""
    with TemporaryDirectory(prefix="adaptree-bench-") as folder, ExitStack() as closing:
        players = []
        for name, policy in policies.items():
            player = _player(assembly, name, policy, Path(folder) / name, seed)
            closing.callback(player.close)
            players.append(player)
        yield players


def play_with_bars(
    players: Sequence[Player], turns: Mapping[str, Sequence[Turn]], measure: Measure
) -> dict[str, list[Played]]:
    """Every player's turns, by its name, after an answer that nobody measures."""
    for player in players:
        player.warm_up(turns[player.name][0].prompts[0])
    with counting() as progress:
        tasks = {
            name: progress.add_task(name, total=sum(len(turn.queries) for turn in mine)) for name, mine in turns.items()
        }
        return play_all(players, turns, measure, lambda name, done: progress.advance(tasks[name], done))


def _player(assembly: Assembly, name: str, policy: PolicyName, folder: Path, seed: int) -> Player:
    notes = Notes()
    if policy == PLAIN:
        return Player(name, assembly.engine(), Nobody(), notes)
    # Rests between updates pass while others have their turn; waiting for them as well would be time nobody loses.
    config = assembly.config.adaptation.model_copy(update={"policy": policy})
    tuning = Tuning(duty_cycle=1.0)
    adaptive = build_adaptive(assembly, config, folder=folder, emit=notes.note, seed=seed, tuning=tuning)
    return Player(name, adaptive.engine, Learning(adaptive), notes)
