"""The provenance of a result."""

import json
import subprocess
from pathlib import Path

import pytest

from service import __version__
from service.assembly import Assembly
from service.conditions import command_line, commit_of, conditions_of, refuse_unwritable, write_report
from service.errors import StartupError
from tests.service.bench.parts import assembled, save_two_layers

KEYS = [
    *("command", "commit", "machine", "cpu_count", "torch", "transformers", "date"),
    *("device", "model", "drafter", "numerics"),
]


@pytest.fixture
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    return assembled(save_two_layers(tmp_path_factory.mktemp("two-layers")))


def test_a_report_has_conditions_rows_and_summary(assembly: Assembly, tmp_path: Path) -> None:
    write_report(tmp_path / "out.json", conditions_of(assembly), [{"set": "a"}], {"tokens": 3})
    report = json.loads((tmp_path / "out.json").read_text())
    assert list(report) == ["conditions", "rows", "summary"]
    assert list(report["conditions"]) == KEYS
    assert all(report["conditions"].values())
    assert report["conditions"]["drafter"] == "memory"
    assert report["conditions"]["numerics"] == "exact"
    assert report["rows"] == [{"set": "a"}]
    assert report["summary"] == {"tokens": 3}


def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    refuse_unwritable(None)
    refuse_unwritable(tmp_path / "new.json")
    for file in (tmp_path, tmp_path / "no" / "such.json"):
        with pytest.raises(StartupError, match="--out"):
            refuse_unwritable(file)


def test_the_command_can_be_typed_again_and_shows_no_key() -> None:
    typed = ["bin/adaptree", "bench", "speed", "--prompts", "a b.jsonl", "--api-keys", "s3cret", "--admin-key=s3cret"]
    assert command_line(typed) == "adaptree bench speed --prompts 'a b.jsonl' --api-keys '***' '--admin-key=***'"


def test_where_files_lay_is_left_out() -> None:
    typed = [
        "adaptree",
        "bench",
        "speed",
        "--prompts",
        "../data/a.jsonl",
        "/b/c.jsonl",
        "--out=~/d.json",
        "--model",
        "o/m",
    ]
    assert command_line(typed) == "adaptree bench speed --prompts a.jsonl c.jsonl --out=d.json --model o/m"
    typed = ["/x/service/__main__.py", "bench", "drafters", "--kinds", "memory,eagle3=/a/b/mine,c(1)=../d"]
    assert command_line(typed) == "python -m service bench drafters --kinds 'memory,eagle3=mine,c(1)=d'"


def test_a_checkout_says_its_commit_and_whether_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    assert commit_of(tmp_path) == f"v{__version__}"
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert commit_of(tmp_path) == head
    (tmp_path / "new.py").write_text("")
    assert commit_of(tmp_path) == f"{head}-modified"
