"""Policies that take turns at the same stream, each with an engine of its own.

Machines slow down for whole minutes, so that policies measured one after the other could not be compared. They take
turns instead, a few queries each, in an order drawn anew for every turn; while one has its turn the others do nothing,
their learning threads included. A turn ends when its queries are answered and the learning thread stands still, be
it amid an update: what is still to be learnt then is learnt beside the policy's next answers, as in a server that goes
on serving. All of that is the turn's net time; the time until the last answer is the engine's.
"""

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from service.bench.shift_learning import Beside, Counts, Noted, Notes
from service.bench.shift_stream import AskedQuery, Prompt, Turn
from service.bench.speed import Measure
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams, SequenceOutput

_WARM_UP_TOKENS = 16


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
