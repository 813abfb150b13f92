"""The shift benchmark: the command, and its arithmetic on turns made by hand."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.shift import gain, policies_of, recovery_of, summary_of
from benchmarks.shift_play import NOTHING, Played, turns_of, windows_of
from service.assembly import Assembly
from service.errors import StartupError
from tests.benchmarks.shift_parts import MEASURE, played, publish, stream_of_halves
from tests.service.bench.parts import written_prompts
from tests.service.test_conditions import KEYS

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_assembly: Assembly) -> tuple[Path, Path]:
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: trained_assembly)
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text("\n".join(written_prompts()))
    new.write_text("\n".join(json.dumps({"prompt": f"on the {word}"}) for word in ("mat", "line", "cat", "in")))
    return old, new


def test_policies_are_named_with_commas() -> None:
    assert policies_of("never, bandit,never") == ["bandit", "never"]
    with pytest.raises(StartupError, match="sometimes, often is none of bandit, always"):
        policies_of("never,sometimes,often")
    with pytest.raises(StartupError, match="add never"):
        policies_of("bandit,always")


def test_the_command_compares_policies(run: Command, files: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = files
    out = tmp_path / "out.json"
    with pytest.raises(StartupError, match="give --after"):
        run("shift", "--before", old)
    code, output = run(
        *("shift", "--before", old, "--after", new, "--queries", 6, "--turn-queries", 2, "--max-tokens", 6),
        *("--policies", "head_only,never", "--out", out),
    )
    assert code == 0, output
    for words in ("head_only", "gain after", "before: old; after: new"):
        assert words in output
    report = json.loads(out.read_text())
    assert set(report["conditions"]) == set(KEYS)
    rows = [row for row in report["rows"] if row["policy"] == "never"]
    assert [(row["phase"], row["queries"]) for row in rows] == [("old", 2), ("old", 1), ("new", 2), ("new", 1)]
    summary = report["summary"]
    assert summary["mismatched_tokens"] == 0
    assert summary["policies"]["never"]["gain_after"] is None
    low, high = summary["policies"]["head_only"]["gain_after"][1:]
    assert low <= high
    assert out.with_suffix(".png").stat().st_size > 10_000


STREAM = stream_of_halves(80)
TURNS = turns_of(STREAM, 5, MEASURE)
EASE = [4, 6, 2, 8, 4, 4, 2, 6, 8, 2, 6, 4, 4, 8, 2, 6]  # how much of each turn's prompts is easy to predict


def turns_with(learnt: list[int]) -> list[Played]:
    return [played(turn, accepted=ease + more) for turn, ease, more in zip(TURNS, EASE, learnt, strict=True)]


PLAIN = turns_with([0] * 16)


def test_recovery_ends_with_the_first_window_near_the_final_gain() -> None:
    def after(turns: list[Played]) -> list[Played]:
        return windows_of(turns)[8:]

    mine = after(turns_with([0] * 8 + [1, 1, 2, 4, 9, 10, 11, 11]))
    assert recovery_of(mine, after(PLAIN)) == (10 / 4, 6 * 5)
    worse = after(turns_with([0] * 8 + [3, 2, 1, 0, 0, 0, 0, 0]))
    assert recovery_of(worse, after(PLAIN)) == (-3 / 4, None)


def test_the_gain_is_paired_and_has_an_interval() -> None:
    slow_minutes = [1.0 + 4 * (number % 3 == 0) for number in range(16)]
    plain = [played(turn, accepted=0, seconds=s) for turn, s in zip(TURNS, slow_minutes, strict=True)]
    mine = [played(turn, accepted=0, seconds=s / 1.25) for turn, s in zip(TURNS, slow_minutes, strict=True)]
    assert gain(mine, plain, seed=0) == pytest.approx((25, 25, 25))
    noisy = [played(t.turn, accepted=0, seconds=t.seconds * (0.9, 1.3)[t.turn.first // 5 % 2]) for t in mine]
    percent, low, high = gain(noisy, plain, seed=0)
    assert low < percent < high


def test_the_summary_of_a_policy() -> None:
    counts = {"training_seconds": 0.25, "updates_full": 1, "refusals": 1}
    mine = [
        played(
            turn,
            accepted=ease + (turn.phase and 2),
            seconds=1.0 if turn.phase else 1.25,
            counts=counts,
            noted=(publish(turn.first + 1, gain=float("nan"), seconds=0.5),),
            gaps=(0.01, 0.03),
        )
        for turn, ease in zip(TURNS, EASE, strict=True)
    ]
    summary = summary_of(mine, PLAIN, STREAM, seed=0)
    assert (summary["tokens_per_second_before"], summary["tokens_per_second_after"]) == (32.0, 40.0)
    assert summary["gain_before"][0] == pytest.approx(-20)
    assert summary["gain_after"][0] == 0.0
    assert summary["tau_after"] - summary_of(PLAIN, PLAIN, STREAM, seed=0)["tau_after"] == 0.5
    assert {name: summary[name] for name in NOTHING} == {
        **NOTHING,
        **{"training_seconds": 4.0, "updates_full": 16, "refusals": 16},
    }
    assert (summary["training_share"], summary["busy_share"]) == (4.0 / 36.0, 0.5)
    assert (summary["itl_p50_seconds"], summary["itl_p99_seconds"]) == pytest.approx((0.02, 0.03))
    events = json.loads(json.dumps(summary, allow_nan=False))["events"]
    assert (events[3]["query"], events[3]["numbers"]) == (16, {"gain": None, "seconds": 0.5})


def test_only_published_weights_can_have_recovered_anything() -> None:
    better = turns_with([0] * 8 + [1, 1, 2, 4, 9, 10, 11, 11])
    assert summary_of(better, PLAIN, STREAM, seed=0)["recovery_queries"] is None
    learnt = [replace(turn, counts={**NOTHING, "publishes": 1}) for turn in better]
    assert summary_of(learnt, PLAIN, STREAM, seed=0)["recovery_queries"] == 30
