"""The command `adaptree bench shift`: what it refuses, and what it prints, writes and draws."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from service.assembly import Assembly
from service.bench import shift
from service.bench.conditions import Conditions
from service.bench.shift import policies_of, table_of
from service.bench.shift_figures import draw, rows_of, summary_of, windows_of
from service.bench.shift_play import Counts, turns_of
from service.cli import app
from service.errors import StartupError
from tests.service.bench.parts import written_prompts
from tests.service.bench.shift_parts import played, publish, stream_of_halves

WIDE = {"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"}


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch, trained_assembly: Assembly) -> None:
    """The command finds a tiny model with a drafter, and leaves the log alone."""
    monkeypatch.setattr(shift, "assemble", lambda config: trained_assembly)
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
    assert set(report["conditions"]) == set(Conditions.__slots__)
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
    turns = turns_of(stream, 5)
    counts = Counts(training_seconds=0.5, updates_head=1, updates_full=2, publishes=1)
    plain = [played(turn, accepted=4) for turn in turns]
    learnt = [
        played(turn, accepted=4 + turn.number, seconds=0.8, counts=counts, noted=(publish(turn.first + 2),))
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
    events = {name: summary.events for name, summary in summaries.items()}
    file = tmp_path / "course.png"
    draw(file, windows, events, stream)
    assert file.stat().st_size > 20_000
    assert len(rows_of("bandit", windows["bandit"], stream)) == 12
