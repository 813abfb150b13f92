"""Taking turns: everybody gets the same queries, nobody works in another's turn, and nothing changes the text."""

import time
from collections import Counter
from dataclasses import replace

import pytest

from adaptation.records import Event
from service.assembly import Assembly
from service.bench.driver import generate
from service.bench.experiment import Measure
from service.bench.shift_play import Counts, Nobody, Notes, Player, play_all, shifted, turns_of
from service.engine.requests import GenerationRequest, SamplingParams
from service.prompts import PromptSet
from tests.service.bench.parts import varied_prompts

PROMPTS = PromptSet("some", tuple(tuple(prompt) for prompt in varied_prompts()))
STREAM = shifted([PROMPTS], [PROMPTS], 12, seed=0)
TURNS = turns_of(STREAM, 4)


class Diary:
    """Stands beside an engine and writes down what it is told; it is a while until it stands still."""

    def __init__(self, name: str, pages: list[tuple[str, str]], notes: Notes) -> None:
        self._name = name
        self._pages = pages
        self._notes = notes
        self._held = 0

    def go_on(self) -> None:
        self._pages.append((self._name, "go on"))

    def hold(self) -> None:
        self._pages.append((self._name, "hold"))
        time.sleep(0.02)
        self._held += 1
        self._notes.note(Event("published", 1, "better", {}))

    def counts(self) -> Counts:
        return Counts(training_seconds=0.25 * self._held, publishes=self._held)

    def close(self) -> None:
        self._pages.append((self._name, "close"))


def test_only_one_works_at_a_time(assembly: Assembly) -> None:
    pages: list[tuple[str, str]] = []
    players = []
    for name in "abc":
        notes = Notes()
        players.append(Player(name, assembly.engine(), Diary(name, pages, notes), notes))
    for player in players:
        player.warm_up(PROMPTS.prompts[0])
    done: Counter[str] = Counter()
    turns, measure = dict.fromkeys("abc", TURNS), Measure(0.0, 6, 2, seed=1)
    everybody = play_all(players, turns, measure, lambda name, count: done.update({name: count}))
    assert done == {"a": 12, "b": 12, "c": 12}
    assert all(len({name for name, _ in pages[at : at + 2]}) == 1 for at in range(0, len(pages), 2))
    assert [what for _, what in pages] == ["go on", "hold"] * (len(pages) // 2)
    orders = [tuple(name for name, _ in pages[at : at + 6 : 2]) for at in range(6, len(pages), 6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 1
    assert {name: [turn.turn for turn in mine] for name, mine in everybody.items()} == dict.fromkeys("abc", TURNS)


def test_a_turn_counts_its_own_learning_and_all_its_time(assembly: Assembly) -> None:
    notes = Notes()
    player = Player("a", assembly.engine(), Diary("a", [], notes), notes)
    player.warm_up(PROMPTS.prompts[0])
    turns = [player.play(turn, Measure(0.0, 6, 1, seed=1)) for turn in TURNS]
    assert [turn.counts for turn in turns] == [Counts(training_seconds=0.25, publishes=1)] * len(TURNS)
    assert [[noted.query for noted in turn.noted] for turn in turns] == [[4], [6], [10], [12]]
    assert all(turn.net_seconds >= turn.engine_seconds + 0.02 for turn in turns)
    assert all(0 < sum(turn.gaps) < turn.engine_seconds for turn in turns)


@pytest.mark.parametrize(("temperature", "concurrency"), [(0.0, 1), (0.9, 3)])
def test_answers_are_those_of_an_engine_asked_by_hand(assembly: Assembly, temperature: float, concurrency: int) -> None:
    assembly = replace(assembly, costs=None)  # a budget by cost follows the clock
    player = Player("never", assembly.engine(), Nobody(), Notes())
    turns = [player.play(turn, Measure(temperature, 16, concurrency, seed=7)) for turn in TURNS]
    found = [query.token_ids for turn in turns for query in turn.queries]
    prompts = [prompt for phase in STREAM.phases for prompt in phase.prompts]
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt=prompt,
            sampling=SamplingParams(seed=7 + number, max_tokens=16, temperature=temperature),
        )
        for number, prompt in enumerate(prompts)
    ]
    engine = assembly.engine()
    expected = [generate(engine, [request]).answers[0] for request in requests]
    assert found == [answer.token_ids for answer in expected]
    accepted = [answer.accepted_per_step for answer in expected]
    verifies = [query.verifies for turn in turns for query in turn.queries]
    if concurrency == 1:
        assert verifies == [len(steps) for steps in accepted]
    assert [turn.num_tokens for turn in turns] == [sum(len(q.token_ids) for q in turn.queries) for turn in turns]


def test_no_more_are_in_flight_than_asked_for(assembly: Assembly) -> None:
    engine = assembly.engine()
    player = Player("never", engine, Nobody(), Notes())
    seen: list[int] = []
    step = engine.step

    def watched_step() -> object:
        seen.append(len(engine.scheduler.running) + len(engine.scheduler.waiting))
        return step()

    engine.step = watched_step  # type: ignore[method-assign,assignment]
    player.play(TURNS[0], Measure(0.0, 12, 3, seed=0))
    assert max(seen) == 3
    assert seen[0] == 3
    assert engine.idle
