"""`adaptree bench shift`: what it refuses, prints, writes and draws, and its arithmetic on turns made by hand."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console
from service.bench.shift import draw, net_gain, policies_of, recovery_of, rows_of, summary_of, table_of
from service.bench.shift_play import NOTHING, Played, turns_of, windows_of
from tests.service.bench.shift_parts import MEASURE, played, publish, stream_of_halves
from typer.testing import CliRunner

from service.assembly import Assembly
from service.bench.driver import Answer
from service.cli import app
from service.errors import StartupError
from tests.service.bench.parts import written_prompts
from tests.service.test_conditions import KEYS

WIDE = {"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"}


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch, trained_assembly: Assembly) -> None:
    """The command finds a tiny model with a drafter, and leaves the log alone."""
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: trained_assembly)
    monkeypatch.setattr("service.logging.configure_logging", lambda level, *, as_json: None)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text("\n".join(written_prompts()))
    new.write_text("\n".join(json.dumps({"prompt": f"on the {word}"}) for word in ("mat", "line", "cat", "in")))
    return old, new


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env=WIDE).invoke(app, ["bench", "shift", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_policies_are_named_with_commas() -> None:
    assert policies_of("never, bandit,never") == ["bandit", "never"]
    with pytest.raises(StartupError, match="sometimes, often is none of bandit, always"):
        policies_of("never,sometimes,often")
    with pytest.raises(StartupError, match="add never"):
        policies_of("bandit,always")


def test_a_shift_needs_something_to_shift_to(files: tuple[Path, Path]) -> None:
    with pytest.raises(StartupError, match="--after says what traffic changes to"):
        run("--before", files[0])


def test_the_plain_policy_alone(files: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = files
    out = tmp_path / "out.json"
    code, output = run(
        *("--before", old, "--after", new, "--queries", 6, "--turn-queries", 2, "--max-tokens", 6),
        *("--policies", "never", "--out", out),
    )
    assert code == 0, output
    assert "never" in output
    report = json.loads(out.read_text())
    assert set(report["conditions"]) == set(KEYS)
    assert [row["phase"] for row in report["rows"]] == ["old", "old", "new", "new"]
    assert [row["queries"] for row in report["rows"]] == [2, 1, 2, 1]
    assert report["summary"]["mismatched_tokens"] == 0
    assert report["summary"]["policies"]["never"]["net_gain_after"] is None
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_epochs_mix_all_files(files: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = files
    out = tmp_path / "out.json"
    code, output = run(
        *("--before", old, "--before", new, "--queries", 12, "--epochs", 3, "--max-tokens", 4),
        *("--policies", "never", "--out", out, "--temperature", 0.7, "--concurrency", 2),
    )
    assert code == 0, output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["phase"], row["queries"]) for row in rows] == [(f"epoch {number}", 4) for number in (1, 2, 3)]


def test_table_and_picture_show_every_policy(tmp_path: Path) -> None:
    stream = stream_of_halves(60)
    turns = turns_of(stream, 5, MEASURE)
    counts = {"training_seconds": 0.5, "updates_head": 1, "updates_full": 2, "publishes": 1}
    plain = [played(turn, accepted=4) for turn in turns]
    learnt = [
        played(turn, accepted=4 + turn.first // 5, seconds=0.8, counts=counts, noted=(publish(turn.first + 2),))
        for turn in turns
    ]
    all_played = {"bandit": learnt, "never": plain}
    summaries = {name: summary_of(mine, plain, stream, seed=0) for name, mine in all_played.items()}
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(table_of(summaries, stream))
    text = console.export_text()
    for words in ("bandit", "+25.0 %", "[+25.0, +25.0]", "6.0 s", "62.5 %", "before: old; after: new"):
        assert words in text
    windows = {name: windows_of(mine) for name, mine in all_played.items()}
    file = tmp_path / "course.png"
    draw(file, windows, stream)
    assert file.stat().st_size > 20_000
    assert len(rows_of("bandit", windows["bandit"], stream)) == 12


STREAM = stream_of_halves(80)
TURNS = turns_of(STREAM, 5, MEASURE)
EASE = [4, 6, 2, 8, 4, 4, 2, 6, 8, 2, 6, 4, 4, 8, 2, 6]  # how much of each turn's prompts is easy to predict


def turns_with(learnt: list[int], *, seconds: float = 1.0) -> list[Played]:
    pairs = zip(TURNS, EASE, learnt, strict=True)
    return [played(turn, accepted=ease + more, seconds=seconds) for turn, ease, more in pairs]


PLAIN = turns_with([0] * 16)


def new_windows(turns: list[Played]) -> list[Played]:
    return windows_of(turns)[8:]


def test_recovery_is_counted_to_the_first_window_near_the_end() -> None:
    mine = new_windows(turns_with([0] * 8 + [1, 1, 2, 4, 9, 10, 11, 11]))
    assert recovery_of(mine, new_windows(PLAIN)) == (
        10 / 4,
        6 * 5,
    )  # the sixth window is the first that is 9 / 4 above the first one


def test_how_easy_prompts_are_cancels() -> None:
    harder = [played(turn, accepted=2 * ease) for turn, ease in zip(TURNS, EASE, strict=True)]
    more = [played(turn, accepted=2 * ease + 4) for turn, ease in zip(TURNS, EASE, strict=True)]
    assert recovery_of(new_windows(more), new_windows(harder)) == (0.0, None)


def test_nothing_gained_is_no_recovery() -> None:
    assert recovery_of(new_windows(turns_with([0] * 8 + [3, 2, 1, 0, 0, 0, 0, 0])), new_windows(PLAIN)) == (
        -3 / 4,
        None,
    )


def test_the_gain_is_paired_and_has_an_interval() -> None:
    slow_minutes = [1.0 + 4 * (number % 3 == 0) for number in range(16)]
    plain = [played(turn, accepted=0, seconds=s) for turn, s in zip(TURNS, slow_minutes, strict=True)]
    mine = [played(turn, accepted=0, seconds=s / 1.25) for turn, s in zip(TURNS, slow_minutes, strict=True)]
    exact = net_gain(mine, plain, seed=0)
    assert (exact.percent, exact.low, exact.high) == pytest.approx((25, 25, 25))
    noisy = [played(t.turn, accepted=0, seconds=t.net_seconds * (0.9, 1.3)[t.turn.first // 5 % 2]) for t in mine]
    gain = net_gain(noisy, plain, seed=0)
    assert gain.low < gain.percent < gain.high
    assert gain == net_gain(noisy, plain, seed=0)


def test_rows_are_windows() -> None:
    counts = {"training_seconds": 0.5, "updates_head": 1, "publishes": 1}
    mine = [played(turn, accepted=4, seconds=2.0, engine_seconds=1.0, counts=counts) for turn in TURNS]
    rows = rows_of("bandit", windows_of(mine), STREAM)
    assert [row["queries"] for row in rows] == [5] * 16
    assert [row["first_query"] for row in rows] == list(range(0, 80, 5))
    assert [row["phase"] for row in rows] == ["old"] * 8 + ["new"] * 8
    last = rows[-1]
    assert (last["tau"], last["tokens_per_second"], last["engine_tokens_per_second"]) == (2.0, 20.0, 40.0)
    assert list(last) == [
        *("policy", "window", "phase", "first_query", "queries", "tau"),
        *("tokens_per_second", "engine_tokens_per_second"),
        *("training_seconds", "updates_head", "updates_full", "publishes", "refusals", "rollbacks"),
    ]
    assert [last[name] for name in ("training_seconds", "updates_head", "updates_full", "publishes")] == [0.5, 1, 0, 1]


def test_a_window_may_hold_several_turns() -> None:
    stream = stream_of_halves(400)
    turns = turns_of(stream, 5, MEASURE)
    mine = windows_of([played(turn, accepted=turn.first // 5 % 2 * 4) for turn in turns])
    assert len(mine) < len(turns) / 2
    assert sum(len(window.turn.requests) for window in mine) == 400
    assert [window.turn.first for window in mine] == sorted(window.turn.first for window in mine)


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
    assert (summary["net_tokens_per_second_before"], summary["net_tokens_per_second_after"]) == (32.0, 40.0)
    assert summary["engine_tokens_per_second_after"] == 80.0
    assert summary["net_gain_before"].percent == pytest.approx(-20)
    assert summary["net_gain_after"].percent == 0.0
    assert summary["tau_after"] - summary_of(PLAIN, PLAIN, STREAM, seed=0)["tau_after"] == 0.5
    assert (summary["final_tau_gain"], summary["recovery_queries"]) == (0.0, None)
    done = {"training_seconds": 4.0, "updates_full": 16, "refusals": 16}
    assert {name: summary[name] for name in NOTHING} == {**NOTHING, **done}
    assert summary["training_share"] == 4.0 / 18.0
    assert summary["waited_seconds"] == 10.0
    assert (summary["itl_p50_seconds"], summary["itl_p99_seconds"]) == pytest.approx((0.02, 0.03))
    as_json = json.loads(json.dumps(summary, allow_nan=False, default=asdict))
    assert as_json["updates_full"] == 16
    assert as_json["events"][3] == {
        "query": 16,
        "kind": "published",
        "version": 1,
        "reason": "better",
        "numbers": {"gain": None, "seconds": 0.5},
    }


def test_only_what_was_published_can_have_recovered_anything() -> None:
    better = turns_with([0] * 8 + [1, 1, 2, 4, 9, 10, 11, 11])
    by_chance = summary_of(better, PLAIN, STREAM, seed=0)
    assert (by_chance["final_tau_gain"], by_chance["recovery_queries"]) == (10 / 4, None)
    learnt = [replace(turn, counts={**NOTHING, "publishes": 1}) for turn in better]
    assert summary_of(learnt, PLAIN, STREAM, seed=0)["recovery_queries"] == 30


def test_the_plain_comparison_gains_nothing_over_itself() -> None:
    summary = summary_of(PLAIN, PLAIN, STREAM, seed=0)
    assert (summary["net_gain_before"], summary["net_gain_after"]) == (None, None)
    assert (summary["final_tau_gain"], summary["recovery_queries"], summary["mismatched_tokens"]) == (None, None, 0)


def test_every_differing_token_counts() -> None:
    mine = list(PLAIN)
    other = Answer((0, 1, 9, 3, 4, 5))  # one differs and two are missing
    mine[7] = replace(PLAIN[7], run=replace(PLAIN[7].run, answers=(*PLAIN[7].run.answers[:4], other)))
    assert summary_of(mine, PLAIN, STREAM, seed=0)["mismatched_tokens"] == 3
