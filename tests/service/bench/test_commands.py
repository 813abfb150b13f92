"""The commands from the outside: options, tables, files, exit codes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from service.assembly import Assembly
from service.bench import lossless
from service.bench.driver import Answer, Run, generate
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest
from tests.service.bench.parts import run_command
from tests.service.test_conditions import KEYS


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch, assembly: Assembly, quiet: None) -> None:
    """The commands find the tiny model loaded."""
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: assembly)


def test_speeds_each_set(prompt_file: Path, tmp_path: Path) -> None:
    other, out = tmp_path / "other.jsonl", tmp_path / "out.json"
    other.write_text('{"prompt": "in the hat"}')
    code, output = run_command(
        "bench", "speed", "--prompts", prompt_file, other, "--max-tokens", 12, "--limit", 2, "--out", out
    )
    assert code == 0, output
    assert "speedup" in output
    report = json.loads(out.read_text())
    assert [(row["set"], row["prompts"], row["tokens"]) for row in report["rows"]] == [
        ("some", 2, 24),
        ("other", 1, 12),
    ]
    assert set(report["rows"][0]) >= {
        *("set", "temperature", "concurrency", "prompts", "tokens", "plain_tokens_per_second"),
        *("speculative_tokens_per_second", "speedup", "tau", "draft_share", "mismatched_tokens"),
    }
    assert report["summary"]["mismatched_tokens"] == 0
    assert set(report["conditions"]) == set(KEYS)


def test_speed_measures_every_temperature_once(prompt_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, output = run_command(
        *("bench", "speed", "--prompts", prompt_file, "--max-tokens", 8, "--out", out),
        *("--temperature", 0, "--temperature", 0.8, "--temperature", 0),
    )
    assert code == 0, output
    report = json.loads(out.read_text())
    assert [row["temperature"] for row in report["rows"]] == [0.0, 0.8]
    assert [means["temperature"] for means in report["summary"]["by_temperature"]] == [0.0, 0.8]


def wrong(
    engine: Engine, requests: list[GenerationRequest], before_step: Callable[[int], None] = lambda number: None
) -> Run:
    """The third token of what is drafted, or answered together with others, is another."""
    done = generate(engine, requests, before_step=before_step)
    if len(requests) == 1 and engine.drafter.name == "none":
        return done
    first = done.answers[0]
    spoilt = Answer((*first.token_ids[:2], 66), first.text, "length", ())
    return Run((spoilt, *done.answers[1:]), done.steps, done.seconds)


def test_speed_with_another_text_is_an_error(prompt_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.bench.speed.generate", wrong)
    code, _ = run_command("bench", "speed", "--prompts", prompt_file, "--max-tokens", 4)
    assert code == 1


def test_lossless_says_what_it_compared(prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless, "BUILT_IN", prompt_file)
    out = tmp_path / "out.json"
    code, output = run_command("check", "lossless", "--tokens", 1500, "--out", out)
    assert code == 0, output
    assert "0 mismatched; numerics: exact" in output
    report = json.loads(out.read_text())
    assert report["summary"]["tokens_compared"] >= 1500
    assert report["summary"]["mismatched_tokens"] == 0
    assert report["summary"]["numerics"] == "exact"
    assert report["summary"]["cases"] == len(report["rows"])
    assert report["summary"]["tokens_compared"] == sum(row["tokens_compared"] for row in report["rows"])


def test_lossless_shows_the_first_mismatch(prompt_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.bench.lossless.generate", wrong)
    code, output = run_command("check", "lossless", "--tokens", 200, "--prompts", prompt_file)
    assert code == 1
    assert "first mismatch: temperature" in output
    assert "token 2 of the answer" in output
    assert "got      [" in output
