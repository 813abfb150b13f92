"""Poisoning: who attacks when, what counts, and the command."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from adaptation.records import Event
from benchmarks.poison import (
    HOSTILE,
    Content,
    Visit,
    attacked,
    honest_part,
    honest_stream,
    honest_turns,
    hostile_of,
    summary_of,
    tau_ratio,
    visits_of,
)
from benchmarks.shift_play import NOTHING, Noted, Played, Turn
from service.assembly import Assembly
from service.bench.driver import Answer, Run
from service.errors import StartupError
from tests.benchmarks.shift_parts import EAGER, EAGER_NUMBERS, MEASURE, played, prompt_set
from tests.service.bench.parts import varied_prompts
from tests.tuned import tune

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
        assert [visit.at for visit in visits] == sorted(visit.at for visit in visits)


def test_the_stealthy_client_is_honest_and_then_bursts() -> None:
    mine = [visit for visit in visits_of(400, 0.3, random.Random(2)) if visit.client == "stealth"]
    before, burst = ([visit for visit in mine if (visit.at < 200) == first] for first in (True, False))
    assert {visit.content for visit in before} == {"honest"}
    assert {visit.content for visit in burst} == {"garbage"}
    assert max(visit.at for visit in burst) < 300
    assert 5.5 < len(burst) / 100 / (len(before) / 200) < 6.5


def test_an_attack_leaves_honest_queries_as_they_are() -> None:
    kept = [[query for query in turn.requests if query.scope.address not in HOSTILE] for turn in TURNS]
    assert kept == [list(turn.requests) for turn in HONEST]
    assert {query.scope.address for turn in HONEST for query in turn.requests} == {f"honest {n}" for n in (1, 2, 3, 4)}
    hostile = [query for turn in TURNS for query in turn.requests if query.scope.address in HOSTILE]
    assert [query.request_id for query in hostile] == [str(number) for number in range(40, 57)]
    contents: dict[Content, tuple[int, ...]] = {"honest": (7,), "garbage": (8,), "narrow": (9,)}
    assert [query.prompt for query in hostile] == [contents[visit.content] for visit in VISITS]
    one = attacked(HONEST, [Visit(7.5, "narrow", "narrow")], {"narrow": cycle([(9,)])}, MEASURE)
    assert [query.sampling.seed for query in one[1].requests] == [5, 6, 7, 40, 8, 9]


def with_answers(turn: Turn, honest: int, hostile: int, noted: tuple[Noted, ...] = ()) -> Played:
    """A turn in which every query took four verifies that accepted so many tokens."""
    accepted = [hostile if query.scope.address in HOSTILE else honest for query in turn.requests]
    answers = tuple(Answer((1, 2, 3), accepted_per_step=(count, 0, 0, 0)) for count in accepted)
    return Played(turn, Run(answers, (), 0.5), {**NOTHING, "over_share": 1}, noted)


def test_only_honest_queries_count() -> None:
    everything = [with_answers(turn, 4, 12) for turn in TURNS]
    mine = honest_part(everything, HONEST)
    assert [turn.turn for turn in mine] == HONEST
    summary = summary_of(mine, [played(turn, accepted=4) for turn in HONEST], STREAM, seed=0)
    assert (summary["tau"], summary["over_share"]) == (2.0, 8)
    assert summary["tau_by_phase"] == {"before": 2.0, "burst": 2.0, "after": 2.0}
    hostile = hostile_of(everything)
    assert {name: client["queries"] for name, client in hostile.items()} == Counter(visit.client for visit in VISITS)
    assert {client["tau"] for client in hostile.values()} == {4.0}
    assert hostile_of([with_answers(turn, 4, 0) for turn in HONEST]) == {}


def test_events_are_placed_by_honest_queries() -> None:
    """The third event comes after the turn's second honest query, with one hostile one before it."""
    visits = [Visit(0.5, "garbage", "garbage"), Visit(5.5, "garbage", "garbage")]
    turns = attacked(HONEST, visits, {"garbage": cycle([(8,)])}, MEASURE)
    event = Event("published", 1, "better")
    noted = {0: (Noted(1, event), Noted(6, event)), 1: (Noted(9, event), Noted(12, event))}
    mine = honest_part([with_answers(turn, 4, 0, noted.get(turn.first // 5, ())) for turn in turns], HONEST)
    assert [one.query for turn in mine for one in turn.noted] == [1, 5, 7, 10]


def test_ratios_compare_the_same_queries() -> None:
    def runs_with(accepted: list[int]) -> list[Played]:
        return [played(turn, accepted=count) for turn, count in zip(HONEST, accepted, strict=True)]

    anchor = runs_with([4] * 8)
    ratio, low, high = tau_ratio(runs_with([3, 5, 3, 5, 3, 5, 3, 5]), anchor, seed=0)
    assert 0.875 <= low < ratio == 1.0 < high <= 1.125
    assert tau_ratio(runs_with([2] * 8), anchor, seed=0) == pytest.approx((0.75, 0.75, 0.75))
    worst = summary_of(runs_with([4, 4, 8, 0, 4, 2, 4, 8]), anchor, STREAM, seed=0)["worst_three_windows"]
    assert worst == {"first_query": 15, "tau": 1.5, "anchor_tau": 2.0, "ratio": 0.75}


@pytest.mark.usefixtures("in_no_hurry")
def test_the_command_runs_attacks_and_reports(
    run: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_assembly: Assembly
) -> None:
    """One honest client has most of the traffic, so that under an attack it soon exceeds its share."""
    tune(monkeypatch, {**EAGER_NUMBERS, "client_share": 0.1, "client_free_queries": 0})
    config = trained_assembly.config.model_copy(update={"adaptation": EAGER})
    assembly = replace(trained_assembly, config=config, costs=None, drafter_name="specblock")
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: assembly)
    file, narrow, out = tmp_path / "honest.jsonl", tmp_path / "narrow.jsonl", tmp_path / "out.json"
    texts = [assembly.tokenizer.decode(prompt[:30]) for prompt in varied_prompts() * 3]
    file.write_text("\n".join(json.dumps({"prompt": f"{text} {number}"}) for number, text in enumerate(texts)))
    narrow.write_text('{"prompt": "in the hat"}\n{"prompt": "on the mat"}')
    with pytest.raises(StartupError, match="policy never learns nothing that could be poisoned"):
        run("poison", "--honest", file, "--adaptation.policy", "never")
    with pytest.raises(StartupError, match="311 prompts are needed and there are 48; lower --queries"):
        run("poison", "--honest", file)
    code, output = run(
        *("poison", "--honest", file, "--queries", 16, "--turn-queries", 4, "--max-tokens", 8, "--narrow", narrow),
        *("--honest-clients", 1, "--out", out),
    )
    assert code == 0, output
    for words in ("attacked", "unattacked", "anchor", "tau burst", "over share", "0.97", "garbage 3"):
        assert words in output
    report = json.loads(out.read_text())
    rows, summary = report["rows"], report["summary"]
    assert [row["run"] for row in rows] == ["attacked"] * 4 + ["unattacked"] * 4 + ["anchor"] * 4
    assert [sum(row["hostile_queries"] for row in rows[at : at + 4]) for at in (0, 4, 8)] == [7, 0, 0]
    assert (summary["queries"], summary["hostile_queries"], summary["mismatched_tokens"]) == (16, 7, 0)
    runs = summary["runs"]
    assert runs["attacked"]["updates_head"] > 0 < runs["unattacked"]["updates_head"]
    assert (runs["anchor"]["updates_head"], runs["anchor"]["training_seconds"]) == (0, 0.0)
    assert summary["over_share"] == runs["attacked"]["over_share"] > 0 == runs["unattacked"]["over_share"]
    assert out.with_suffix(".png").stat().st_size > 10_000
