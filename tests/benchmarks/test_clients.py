"""Several clients beside one: shares against a brute-force count, streams that ask again, and the command."""

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from benchmarks import clients
from benchmarks.clients import AGAIN, ONE, SEVERAL, Client, Streams, fair_shares, mixes_of
from service.assembly import Assembly, assemble
from service.bench.driver import Drive
from service.bench.experiment import Measure
from service.errors import StartupError
from tests.service.bench.parts import varied_prompts
from tests.service.engine.harness import waiting_in


def asking(streams: int, max_tokens: int = 6) -> Client:
    return Client(streams, "some", varied_prompts()[:5], Measure(0.0, max_tokens, 1, 0))


@pytest.fixture(autouse=True)
def _a_clock_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes 10 ms: turns have as many steps on every machine, fifty a second."""
    times = count(0.0, 0.01)
    monkeypatch.setattr(clients, "Drive", partial(Drive, clock=lambda: next(times)))


def filled_unit_by_unit(demands: list[int], total: int) -> list[int]:
    shares = [0] * len(demands)
    for _ in range(total):
        open_ones = [client for client, demand in enumerate(demands) if shares[client] < demand]
        shares[min(open_ones, key=shares.__getitem__)] += 1
    return shares


def test_fair_shares_are_those_of_filling_up_unit_by_unit() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        demands = [rng.randint(0, 60) for _ in range(rng.randint(1, 7))]
        total = rng.randint(0, sum(demands))
        found = fair_shares(demands, total)
        assert sum(found) == pytest.approx(total)
        assert found == pytest.approx(filled_unit_by_unit(demands, total), abs=1.0)


def test_each_stream_asks_again_and_texts_do_not_depend_on_its_owner(assembly: Assembly) -> None:
    mix = [asking(1), asking(3)]
    several, one = (Streams(assembly.engine(), mix, as_one=as_one) for as_one in (False, True))
    for streams in (several, one):
        while streams.drive.num_finished < 12:
            streams.drive.go_on(0.1)
    sequences = [*several._engine.scheduler.running, *waiting_in(several._engine.scheduler.queue)]
    assert Counter(sequence.client for sequence in sequences) <= Counter({"0": 1, "1": 3})
    assert {sequence.client for sequence in one._engine.scheduler.running} <= {""}
    for streams in (several, one):
        sent = [int(name) for name, _ in streams._sent()]
        by_stream = [[number for number in sent if number % 4 == stream] for stream in range(4)]
        assert by_stream == [list(range(stream, 4 * len(mine) + stream, 4)) for stream, mine in enumerate(by_stream)]
    mine, others = several.answers(), one.answers()
    assert len(mine.keys() & others.keys()) > 4
    assert all(mine[name] == others[name] for name in mine.keys() & others.keys())


def test_mixes_are_sums_of_clients() -> None:
    assert mixes_of("3x1, 1+11,long+2x4") == {"3x1": ["1"] * 3, "1+11": ["1", "11"], "long+2x4": ["long", "4", "4"]}


@pytest.mark.parametrize("text", ["", "0", "1+", "x2", "2x0", "1+many", "short"])
def test_other_mixes_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match="--mixes"):
        mixes_of(text)


@pytest.fixture
def _loaded(monkeypatch: pytest.MonkeyPatch, trained_assembly: Assembly, quiet: None) -> None:
    scarce = assemble(trained_assembly.config.model_copy(update={"max_sequences": 3}))
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: scarce)
    monkeypatch.setattr(clients, "SLICE_SECONDS", 0.5)


@pytest.mark.usefixtures("_loaded")
def test_the_command_compares_clients_with_one(
    run: Callable[..., tuple[int, str]], prompt_file: Path, tmp_path: Path
) -> None:
    out, again = tmp_path / "out.json", tmp_path / "again.jsonl"
    again.write_text(prompt_file.read_text())
    code, output = run(
        *("clients", "--mixes", "1+4,long+1", "--seconds", 1.5, "--max-tokens", 4, "--prompts", prompt_file),
        *("--prompts", again, "--temperature", 0, "--temperature", 0.7, "--out", out),
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
