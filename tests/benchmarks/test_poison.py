"""Poisoning: who attacks when, what honest clients got, and the command around it."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest
from service.bench.shift_play import NOTHING, Noted, Played, Player, Turn, play_all, windows_of
from tests.service.bench.shift_parts import EAGER, EAGER_NUMBERS, MEASURE, played, prompt_set

from adaptation.config import AdaptationConfig
from adaptation.records import Event
from benchmarks import poison
from benchmarks.poison import (
    HOSTILE,
    Content,
    Stretch,
    Visit,
    attacked,
    garbage,
    honest_part,
    honest_stream,
    honest_turns,
    hostile_by_window,
    hostile_of,
    narrow,
    ratio_of,
    rows_of,
    stretches,
    summary_of,
    visits_of,
)
from service.assembly import Assembly
from service.bench.driver import Answer, Run
from service.bench.experiment import Measure
from service.errors import StartupError
from tests.service.bench.parts import varied_prompts
from tests.service.test_conditions import KEYS
from tests.tuned import tune

Command = Callable[..., tuple[int, str]]
PROMPTS = prompt_set("honest", 40).prompts
STREAM = honest_stream(PROMPTS)
HONEST = honest_turns(STREAM, 5, 4, MEASURE, random.Random(1))
VISITS = visits_of(40, 0.3, random.Random(0))
HOSTILE_PROMPTS: dict[Content, Iterator[tuple[int, ...]]] = {
    "honest": cycle([(7,)]),
    "garbage": cycle([(8,)]),
    "narrow": cycle([(9,)]),
}
TURNS = attacked(HONEST, VISITS, HOSTILE_PROMPTS, MEASURE)


def test_hostile_clients_send_their_share_of_all_queries() -> None:
    for queries, share, expected in ((40, 0.3, 17), (300, 0.3, 129), (20, 0.5, 20), (9, 0.0, 0)):
        visits = visits_of(queries, share, random.Random(5))
        assert len(visits) == expected
        counts = Counter(visit.client for visit in visits)
        assert max(counts.values(), default=0) - min(counts.values(), default=0) <= 1
        assert [visit.place for visit in visits] == sorted(visit.place for visit in visits)
        assert all(0 <= visit.place < queries for visit in visits)


def test_the_stealthy_client_is_honest_and_then_bursts() -> None:
    mine = [visit for visit in visits_of(400, 0.3, random.Random(2)) if visit.client == "stealth"]
    before, burst = ([visit for visit in mine if (visit.place < 200) == first] for first in (True, False))
    assert {visit.content for visit in before} == {"honest"}
    assert {visit.content for visit in burst} == {"garbage"}
    assert max(visit.place for visit in burst) < 300
    rates = len(before) / 200, len(burst) / 100
    assert 5.5 < rates[1] / rates[0] < 6.5


@pytest.mark.parametrize("client", ["garbage", "narrow"])
def test_the_others_keep_their_rate(client: str) -> None:
    places = [visit.place for visit in visits_of(400, 0.3, random.Random(2)) if visit.client == client]
    quarters = Counter(int(place // 100) for place in places)
    assert max(quarters.values()) - min(quarters.values()) <= 1


def test_the_seed_alone_decides_about_visits() -> None:
    assert visits_of(40, 0.3, random.Random(0)) == VISITS
    assert visits_of(40, 0.3, random.Random(1)) != VISITS


def test_garbage_is_any_token_and_any_character(assembly: Assembly) -> None:
    vocab_size = assembly.target.vocab_size
    prompts = list(islice(garbage(assembly.tokenizer, vocab_size, random.Random(0)), 40))
    assert all(0 <= token < vocab_size for prompt in prompts for token in prompt)
    assert len({token for prompt in prompts[::2] for token in prompt}) > vocab_size * 0.8
    empty = assembly.tokenizer.render_chat([{"role": "user", "content": ""}])
    assert all(prompt[0] == empty[0] and len(prompt) > len(empty) for prompt in prompts[1::2])
    assert len(set(prompts)) == 40


def test_the_narrow_client_asks_for_a_few_formats(assembly: Assembly) -> None:
    prompts = list(islice(narrow(assembly.tokenizer, random.Random(0)), 60))
    forms = Counter(re.sub(r"\d+", "N", assembly.tokenizer.decode(prompt)) for prompt in prompts)
    assert len(set(prompts)) > 50
    assert len(forms) == 3
    assert min(forms.values()) > 10


def test_an_attack_leaves_honest_queries_as_they_are() -> None:
    kept = [[query for query in turn.requests if query.scope.name not in HOSTILE] for turn in TURNS]
    assert kept == [list(turn.requests) for turn in HONEST]
    assert [replace(turn, requests=()) for turn in TURNS] == [replace(turn, requests=()) for turn in HONEST]
    assert [query.prompt for turn in HONEST for query in turn.requests] == list(PROMPTS)
    assert {query.scope.name for turn in HONEST for query in turn.requests} == {f"honest {n}" for n in (1, 2, 3, 4)}


def test_hostile_queries_come_at_their_places_under_numbers_of_their_own() -> None:
    hostile = [query for turn in TURNS for query in turn.requests if query.scope.name in HOSTILE]
    assert [query.request_id for query in hostile] == [str(number) for number in range(40, 57)]
    assert [query.sampling.seed for query in hostile] == list(range(40, 57))
    assert [query.scope.name for query in hostile] == [visit.client for visit in VISITS]
    contents: dict[Content, tuple[int, ...]] = {"honest": (7,), "garbage": (8,), "narrow": (9,)}
    assert [query.prompt for query in hostile] == [contents[visit.content] for visit in VISITS]
    one = attacked(HONEST, [Visit(7.5, "narrow", "narrow")], {"narrow": cycle([(9,)])}, MEASURE)
    assert [query.sampling.seed for query in one[1].requests] == [5, 6, 7, 40, 8, 9]
    assert [len(turn.requests) for turn in one] == [5, 6, 5, 5, 5, 5, 5, 5]


def test_turns_end_where_the_burst_begins_and_ends() -> None:
    stream = honest_stream(PROMPTS[:30])
    assert [(phase.name, len(phase.prompts)) for phase in stream.phases] == [("before", 15), ("burst", 7), ("after", 8)]
    assert [len(turn.requests) for turn in honest_turns(stream, 5, 1, MEASURE, random.Random(0))] == [
        5,
        5,
        5,
        5,
        2,
        5,
        3,
    ]


def with_answers(turn: Turn, honest: int, hostile: int, noted: tuple[Noted, ...] = ()) -> Played:
    """Four verifies of every query, that accepted so many tokens."""
    accepted = [hostile if query.scope.name in HOSTILE else honest for query in turn.requests]
    answers = tuple(Answer((1, 2, 3), accepted_per_step=(count, 0, 0, 0)) for count in accepted)
    return Played(turn, Run(answers, (), 0.5), 1.0, {**NOTHING, "over_share": 1}, noted)


def test_only_honest_queries_count() -> None:
    mine = honest_part([with_answers(turn, 4, 12) for turn in TURNS], HONEST)
    assert [turn.turn for turn in mine] == HONEST
    assert [len(turn.run.answers) for turn in mine] == [5] * 8
    summary = summary_of(mine, [played(turn, accepted=4) for turn in HONEST], STREAM, seed=0)
    assert (summary.tau, summary.counts["over_share"]) == (2.0, 8)
    assert summary.tau_by_phase == {"before": 2.0, "burst": 2.0, "after": 2.0}


def test_hostile_queries_are_counted_apart() -> None:
    everything = [with_answers(turn, 4, 12) for turn in TURNS]
    hostile = hostile_of(everything)
    assert {name: client.queries for name, client in hostile.items()} == Counter(visit.client for visit in VISITS)
    assert {client.tau for client in hostile.values()} == {4.0}
    assert sum(client.tokens for client in hostile.values()) == 3 * 17
    by_window = hostile_by_window(everything)
    assert {name: sum(counts.values()) for name, counts in by_window.items()} == {
        "garbage": 6,
        "narrow": 6,
        "stealth": 5,
    }
    assert set(by_window["stealth"]) == set(range(8))
    assert hostile_of([with_answers(turn, 4, 0) for turn in HONEST]) == {}


def test_events_are_placed_by_honest_queries() -> None:
    """The third event comes after the turn's second honest query, with one hostile one before it."""
    visits = [Visit(0.5, "garbage", "garbage"), Visit(5.5, "garbage", "garbage")]
    turns = attacked(HONEST, visits, {"garbage": cycle([(8,)])}, MEASURE)
    event = Event("published", 1, "better")
    noted = {0: (Noted(1, event), Noted(6, event)), 1: (Noted(9, event), Noted(12, event))}
    mine = honest_part([with_answers(turn, 4, 0, noted.get(turn.first // 5, ())) for turn in turns], HONEST)
    assert [one.query for turn in mine for one in turn.noted] == [1, 5, 7, 10]


def runs_with(accepted: Sequence[int]) -> list[Played]:
    return [played(turn, accepted=count) for turn, count in zip(HONEST, accepted, strict=True)]


def test_the_ratio_is_that_of_tau_on_the_same_queries() -> None:
    mine, theirs = runs_with([3, 5, 3, 5, 3, 5, 3, 5]), runs_with([4] * 8)
    ratio = ratio_of(mine, theirs, seed=0)
    assert ratio.ratio == 1.0
    assert 0.875 <= ratio.low < 1 < ratio.high <= 1.125
    exact = ratio_of(runs_with([2] * 8), theirs, seed=0)
    assert (exact.ratio, exact.low, exact.high) == pytest.approx((0.75, 0.75, 0.75))


def test_the_worst_three_windows_in_a_row() -> None:
    mine, anchor = runs_with([4, 4, 8, 0, 4, 2, 4, 8]), runs_with([4] * 8)
    found = stretches(windows_of(mine), windows_of(anchor))
    assert [stretch.first_query for stretch in found] == [0, 5, 10, 15, 20, 25]
    summary = summary_of(mine, anchor, STREAM, seed=0)
    assert summary.worst == Stretch(15, 1.5, 2.0)
    assert summary.as_json()["worst"] == {"first_query": 15, "tau": 1.5, "anchor_tau": 2.0, "ratio": 0.75}
    few = stretches(windows_of(mine[:2]), windows_of(anchor[:2]))
    assert few == [Stretch(0, 2.0, 2.0)]


def test_every_differing_token_of_honest_clients_counts() -> None:
    mine, anchor = runs_with([4] * 8), runs_with([4] * 8)
    other = Answer((0, 1, 9, 3, 4, 5, 6))  # one differs and one is missing
    mine[7] = replace(mine[7], run=replace(mine[7].run, answers=(other, *mine[7].run.answers[1:])))
    assert summary_of(mine, anchor, STREAM, seed=0).mismatched_tokens == 2


def test_rows_are_windows_with_what_learning_did() -> None:
    rows = rows_of("attacked", windows_of([with_answers(turn, 4, 0) for turn in HONEST]), {2: 3}, STREAM)
    assert [row["hostile_queries"] for row in rows] == [0, 0, 3, 0, 0, 0, 0, 0]
    assert [row["phase"] for row in rows] == ["before"] * 4 + ["burst"] * 2 + ["after"] * 2
    as_json = json.loads(json.dumps(rows[1], allow_nan=False))
    assert (as_json["run"], as_json["first_query"], as_json["queries"], as_json["tau"]) == ("attacked", 5, 5, 2.0)
    assert (as_json["over_share"], as_json["publishes"]) == (1, 0)


def test_the_engine_hears_who_asks(assembly: Assembly) -> None:
    engine = assembly.engine()
    heard: list[tuple[str, str, int | None]] = []
    add = engine.add

    def listening(request: object) -> None:
        heard.append((request.request_id, request.scope.name, request.sampling.seed))  # type: ignore[attr-defined]
        add(request)  # type: ignore[arg-type]

    engine.add = listening  # type: ignore[method-assign]
    measure = Measure(0.0, 4, 2, seed=100)
    honest = honest_turns(STREAM, 5, 4, measure, random.Random(1))
    turn = attacked(honest, [Visit(1.5, "narrow", "narrow")], {"narrow": cycle([(9,)])}, measure)[0]
    Player("attacked", engine).play(turn, 2)
    assert [name for name, _, _ in heard] == ["0", "1", "40", "2", "3", "4"]
    assert heard[2] == ("40", "narrow", 140)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, trained_assembly: Assembly) -> Assembly:
    """The command finds a tiny model with a drafter that learns at once, and leaves the log alone."""
    tune(monkeypatch, {**EAGER_NUMBERS, "client_share": 0.1, "client_free_queries": 0})
    learning = EAGER.model_copy(update={"policy": "head_only"})
    config = trained_assembly.config.model_copy(update={"adaptation": learning})
    assembly = replace(trained_assembly, config=config, costs=None, drafter_name="specblock")
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: assembly)
    return assembly


@pytest.fixture
def honest_file(tmp_path: Path, tiny: Assembly) -> Path:
    file = tmp_path / "honest.jsonl"
    texts = [tiny.tokenizer.decode(prompt[:30]) for prompt in varied_prompts() * 3]
    file.write_text("\n".join(json.dumps({"prompt": f"{text} {number}"}) for number, text in enumerate(texts)))
    return file


@pytest.mark.usefixtures("in_no_hurry")
def test_the_command_runs_attacks_and_reports(run: Command, honest_file: Path, tmp_path: Path) -> None:
    """One honest client has most of the traffic, so that beside an attack it soon has had its share."""
    out = tmp_path / "out.json"
    code, output = run(
        *("poison", "--honest", honest_file, "--queries", 16, "--turn-queries", 4, "--max-tokens", 8),
        *("--honest-clients", 1, "--out", out),
    )
    assert code == 0, output
    for words in ("attacked", "unattacked", "anchor", "asked for are 0.97", "garbage 3 queries", "stealth 2 queries"):
        assert words in output
    report = json.loads(out.read_text())
    assert set(report["conditions"]) == set(KEYS)
    rows = report["rows"]
    assert [row["run"] for row in rows] == ["attacked"] * 4 + ["unattacked"] * 4 + ["anchor"] * 4
    assert sum(row["queries"] for row in rows) == 3 * 16
    assert [sum(row["hostile_queries"] for row in rows[at : at + 4]) for at in (0, 4, 8)] == [7, 0, 0]
    summary = report["summary"]
    assert (summary["queries"], summary["hostile_queries"], summary["mismatched_tokens"]) == (16, 7, 0)
    assert summary["ratio"]["low"] <= summary["ratio"]["ratio"] <= summary["ratio"]["high"]
    runs: Mapping[str, Mapping[str, float]] = summary["runs"]
    assert runs["attacked"]["updates_head"] > 0
    assert runs["unattacked"]["updates_head"] > 0
    assert (runs["anchor"]["updates_head"], runs["anchor"]["training_seconds"]) == (0, 0.0)
    assert summary["over_share"] == runs["attacked"]["over_share"] > 0
    assert runs["unattacked"]["over_share"] == runs["anchor"]["over_share"] == 0
    assert sum(client["queries"] for client in summary["hostile"].values()) == 7
    assert out.with_suffix(".png").stat().st_size > 20_000


def test_the_narrow_client_can_bring_its_own_prompts(
    run: Command, honest_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "narrow.jsonl"
    file.write_text('{"prompt": "in the hat"}\n{"prompt": "on the mat"}')
    seen: list[Sequence[int]] = []

    def watched(players: list[Player], turns: dict[str, list[Turn]], measure: Measure) -> dict[str, list[Played]]:
        seen.extend(
            query.prompt for turn in turns["attacked"] for query in turn.requests if query.scope.name == "narrow"
        )
        return play_all(players, turns, measure)

    monkeypatch.setattr(poison, "play_all", watched)
    code, output = run(
        *("poison", "--honest", honest_file, "--queries", 8, "--share", 0.5, "--max-tokens", 4, "--narrow", file),
        *("--temperature", 0.8, "--concurrency", 3),
    )
    assert code == 0, output
    assert len(seen) == 3
    assert seen[0] == seen[2] != seen[1]


def test_another_text_is_an_error(run: Command, honest_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(players: list[Player], turns: dict[str, list[Turn]], measure: Measure) -> dict[str, list[Played]]:
        everything = play_all(players, turns, measure)
        first = everything["attacked"][0]
        honest = next(at for at, query in enumerate(first.turn.requests) if query.scope.name not in HOSTILE)
        answers = list(first.run.answers)
        answers[honest] = replace(answers[honest], token_ids=(-1, *answers[honest].token_ids[1:]))
        wrong_first = replace(first, run=replace(first.run, answers=tuple(answers)))
        return {**everything, "attacked": [wrong_first, *everything["attacked"][1:]]}

    monkeypatch.setattr(poison, "play_all", wrong)
    code, _ = run("poison", "--honest", honest_file, "--queries", 8, "--max-tokens", 4)
    assert code == 1


def test_what_cannot_be_measured_is_refused(run: Command, honest_file: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="policy never learns nothing that could be poisoned"):
        run("poison", "--honest", honest_file, "--adaptation.policy", "never")
    with pytest.raises(StartupError, match="311 prompts are needed and there are 48; lower --queries"):
        run("poison", "--honest", honest_file)
    assert AdaptationConfig().policy != "never"
