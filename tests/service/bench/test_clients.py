"""Several clients beside one: shares against a brute-force count, streams that ask again, and the command."""

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from service.assembly import Assembly, assemble
from service.bench import clients
from service.bench.clients import AGAIN, ONE, SEVERAL, Client, Streams, fair_shares, long_prompts, mixes_of, ratio_of
from service.bench.driver import Drive, Span
from service.bench.experiment import Measure
from service.engine.engine import Engine, EngineOutput
from service.engine.requests import GenerationRequest, SequenceOutput
from service.engine.scheduler import PROMPT_SHARE
from service.errors import StartupError
from tests.service.bench.parts import run_command, varied_prompts


def asking(streams: int, max_tokens: int = 6) -> Client:
    return Client(streams, "some", varied_prompts()[:5], Measure(0.0, max_tokens, 1, 0))


@pytest.fixture(autouse=True)
def _a_clock_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes 10 ms: turns have as many steps on every machine, fifty a second."""
    times = count(0.0, 0.01)
    monkeypatch.setattr(clients, "Drive", partial(Drive, clock=lambda: next(times)))


@dataclass
class OneAtATime:
    """An engine with room for one sequence, which is always one of the streams `favoured`, of three, if any waits."""

    favoured: set[int]
    scheduler: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(running=[], waiting=[]))
    idle: bool = False

    def add(self, request: GenerationRequest) -> None:
        self.scheduler.waiting.append(SimpleNamespace(request=request))

    def step(self) -> EngineOutput:
        """One token for the one that runs, whose answer then ends."""
        waiting = self.scheduler.waiting
        chosen = next((one for one in waiting if int(one.request.request_id) % 3 in self.favoured), waiting[0])
        waiting.remove(chosen)
        self.scheduler.running = [chosen]
        return EngineOutput([SequenceOutput(chosen.request.request_id, 0, (1,), "", finish_reason="length")], [], None)


def filled_unit_by_unit(demands: list[int], total: int) -> list[int]:
    shares = [0] * len(demands)
    for _ in range(total):
        open_ones = [client for client, demand in enumerate(demands) if shares[client] < demand]
        shares[min(open_ones, key=shares.__getitem__)] += 1
    return shares


@pytest.mark.parametrize("seed", range(20))
def test_fair_shares_are_those_of_filling_up_unit_by_unit(seed: int) -> None:
    rng = random.Random(seed)
    demands = [rng.randint(0, 60) for _ in range(rng.randint(1, 7))]
    total = rng.randint(0, sum(demands))
    found = fair_shares(demands, total)
    assert sum(found) == pytest.approx(total)
    assert found == pytest.approx(filled_unit_by_unit(demands, total), abs=1.0)


def test_what_a_client_does_not_use_is_shared_by_the_others() -> None:
    assert fair_shares([10.0, float("inf"), 50.0, float("inf")], 130.0) == [10.0, 40.0, 40.0, 40.0]


@pytest.mark.parametrize("fed", [0, 1])
def test_a_client_that_is_passed_over_falls_short_of_half(fed: int) -> None:
    engine = cast(Engine, OneAtATime([{0, 1}, {2}][fed]))
    streams = Streams(engine, [asking(2), asking(1)], as_one=False)
    streams.drive.go_on(1.0)
    starved = 1 - fed
    total = sum(streams.served.values())
    shares = fair_shares([streams.demand(0), streams.demand(1)], total)
    assert streams.served[starved] == 0 < total == streams.served[fed]
    assert shares[starved] >= total / 2
    # Of the two streams of client 0 one runs and one waits: it could use twice as much.
    assert streams.demand(fed) == pytest.approx(total * (2 if fed == 0 else 1), rel=0.01)


def test_prompts_count_at_their_weight_and_once(assembly: Assembly) -> None:
    streams = Streams(assembly.engine(), [asking(1)], as_one=False)
    streams.drive.go_on(1.0)
    begun = [answer for _, answer in streams._sent() if answer.token_ids]
    prompts = sum(len(streams._request(number).prompt) for number in range(len(begun)))
    assert streams.tokens[0] == sum(len(answer.token_ids) for answer in begun) > 0
    assert streams.served[0] == streams.tokens[0] + PROMPT_SHARE * prompts


def test_each_stream_asks_again_and_texts_do_not_depend_on_its_owner(assembly: Assembly) -> None:
    mix = [asking(1), asking(3)]
    several, one = (Streams(assembly.engine(), mix, as_one=as_one) for as_one in (False, True))
    for streams in (several, one):
        while streams.drive.num_finished < 12:
            streams.drive.go_on(0.1)
    sequences = [*several._engine.scheduler.running, *several._engine.scheduler.waiting]
    assert Counter(sequence.client for sequence in sequences) <= Counter({"0": 1, "1": 3})
    assert {sequence.client for sequence in one._engine.scheduler.running} <= {""}
    for streams in (several, one):
        sent = [int(name) for name, _ in streams._sent()]
        by_stream = [[number for number in sent if number % 4 == stream] for stream in range(4)]
        assert by_stream == [list(range(stream, 4 * len(mine) + stream, 4)) for stream, mine in enumerate(by_stream)]
    mine, others = several.answers(), one.answers()
    assert len(mine.keys() & others.keys()) > 4
    assert all(mine[name] == others[name] for name in mine.keys() & others.keys())


def test_a_client_that_never_waits_has_its_share(assembly: Assembly) -> None:
    streams = Streams(assembly.engine(), [asking(1), asking(2)], as_one=False)
    streams.drive.go_on(1.0)
    assert [streams.demand(client) for client in (0, 1)] == [streams.served[0], streams.served[1]]
    assert fair_shares([streams.demand(0), streams.demand(1)], sum(streams.served.values())) == pytest.approx(
        [streams.served[0], streams.served[1]]
    )


def test_ratios_are_paired_by_turn() -> None:
    """A machine that is slow for a while is slow for both."""
    paces = [1.0, 5.0, 2.0, 9.0, 3.0]
    mine = [Span(2.0, int(20 * pace)) for pace in paces]
    others = [Span(2.0, int(40 * pace)) for pace in paces]
    assert ratio_of(mine, others) == pytest.approx((0.5, 0.5, 0.5))
    ratio, low, high = ratio_of(mine, [*others[1:], others[0]])
    assert ratio == pytest.approx(0.5)
    assert low < ratio < high


def test_mixes_are_sums_of_clients() -> None:
    assert mixes_of("3x1, 1+11,long+2x4") == {"3x1": ["1"] * 3, "1+11": ["1", "11"], "long+2x4": ["long", "4", "4"]}


@pytest.mark.parametrize("text", ["", "0", "1+", "x2", "2x0", "1+many", "short"])
def test_other_mixes_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match="--clients"):
        mixes_of(text)


def test_long_prompts_begin_with_different_ones() -> None:
    assert long_prompts([(1, 2), (3,)], 4) == [(1, 2, 3, 1), (3, 1, 2, 3)]


@pytest.fixture
def _loaded(monkeypatch: pytest.MonkeyPatch, trained_assembly: Assembly, quiet: None) -> None:
    scarce = assemble(trained_assembly.config.model_copy(update={"max_sequences": 3}))
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: scarce)
    monkeypatch.setattr(clients, "SLICE_SECONDS", 0.5)


@pytest.mark.usefixtures("_loaded")
def test_the_command_compares_clients_with_one(prompt_file: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out.json", tmp_path / "again.jsonl"
    again.write_text(prompt_file.read_text())
    code, output = run_command(
        *("bench load --clients 1+4,long+1 --seconds 1.5 --max-tokens 4 --prompts", prompt_file, "--prompts", again),
        *("--temperature 0 --temperature 0.7 --out", out),
    )
    assert code == 0, output
    report = json.loads(out.read_text())
    scarce, long = report["rows"]
    assert (scarce["mix"], scarce["turns"], scarce["max_sequences"], long["mix"]) == ("1+4", 3, 3, "long+1")
    assert set(scarce["tokens_per_second"]) == {SEVERAL, ONE, AGAIN}
    assert scarce["mismatched_tokens"] == long["mismatched_tokens"] == report["summary"]["mismatched_tokens"] == 0
    assert [(one["streams"], one["prompts"], one["temperature"]) for one in scarce["clients"]] == [
        (1, "some", 0.0),
        (4, "again", 0.7),
    ]
    assert long["clients"][0]["prompts"] == f"some, {256 - 6} tokens each"
    for row in report["rows"]:
        served, shares = ([one[key] for one in row["clients"]] for key in ("served", "fair_share"))
        assert sum(served) == pytest.approx(sum(shares))
        assert row["over_one_client"][1] <= row["over_one_client"][0] <= row["over_one_client"][2]
        assert row["largest_shortfall"] == max(one["shortfall"] for one in row["clients"])
        for one in row["clients"]:
            assert 0 < one["ttft_p50_seconds"] <= one["ttft_p95_seconds"]
            assert one["tokens"] > 0 < one["under_one_client"]["tokens"]


@pytest.mark.usefixtures("_loaded")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--clients 2x1 --arrival poisson --rate 3", "closed loops"),
        ("--clients two", "no mix"),
        ("--temperature 0 --temperature 1", "more than one"),
    ],
)
def test_the_command_says_what_to_change(prompt_file: Path, arguments: str, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        run_command("bench load --prompts", prompt_file, arguments)


@pytest.mark.usefixtures("_loaded")
def test_a_different_text_fails_the_command(prompt_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "count_mismatches", lambda expected, got: 1)
    assert run_command("bench load --prompts", prompt_file, "--clients 2x1 --seconds 1.5 --max-tokens 2")[0] == 1
