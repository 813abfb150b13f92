"""A client that guesses finds what is there to be found, and nothing where answers look alike."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.checkpoint import write_dummy
from benchmarks.side_channel import Look, Trace, guessed, row_of
from benchmarks.soak import growth_of
from benchmarks.streams import Received
from tests.service.bench.parts import written_prompts


def runs_of(prompts: int, runs: int, *, tells: bool) -> list[list[Trace]]:
    """Answers whose packets are larger for later prompts, or alike."""
    rng = np.random.default_rng(0)

    def trace(prompt: int) -> Trace:
        sizes = rng.integers(100, 120, size=20) + 5 * prompt * tells
        return Trace(tuple(sizes.tolist()), tuple(np.cumsum(rng.uniform(0.01, 0.02, 20)).tolist()), "")

    return [[trace(prompt) for prompt in range(prompts)] for _ in range(runs)]


def test_what_sizes_tell_is_found_and_chance_is_not_beaten() -> None:
    reported, silent = (row_of("x", runs_of(10, 12, tells=tells), 8) for tells in (True, False))
    assert reported["chance"] == 0.1
    assert min(reported["nearest"], reported["discriminant"]) > 0.6
    assert max(silent["nearest"], silent["discriminant"]) < 0.4


def test_a_run_watches_every_way(run_tiny: Callable[..., tuple[dict[str, Any], str]]) -> None:
    report, output = run_tiny(
        *("side-channel", "--limit", 2, "--learn", 2, "--guess", 1, "--max-tokens", 12, "--release-seconds", 0.01),
        *("--budget-policy", "fixed", "--max-budget", 4, "--kv-cache", "10MiB"),
    )
    rows = {row["way"]: row for row in report["rows"]}
    assert report["summary"] == {"prompts": 2, "chance": 0.5, "mismatched_tokens": 0}
    assert rows["per_step"]["sizes"] > 1
    assert rows["obfuscated"]["sizes"] == rows["constant_rate"]["sizes"] == 1
    assert rows["constant_rate"]["packets"] > 6
    assert "discriminant" in output


def test_the_prompt_that_saves_most_is_guessed_and_equals_share() -> None:
    before = [Look(1.0, 9, [{"a"}]), Look(1.0, 9, [{"a"}])]
    seen = [Look(1.1, 9, [{"a"}]), Look(0.5, 9, [{"b"}])]
    assert guessed(seen, before, 1) == {"by_seconds": 1.0, "by_steps": 0.5, "trees_changed": 0.5}
    assert guessed(seen, before, 0) == {"by_seconds": 0.0, "by_steps": 0.5, "trees_changed": 0.5}


def test_walls_leave_chance(run_tiny: Callable[..., tuple[dict[str, Any], str]]) -> None:
    words = ("--seen", "past-answers", "--limit", 3, "--max-tokens", 24, "--budget-policy", "fixed")
    report, _ = run_tiny("side-channel", *words)
    rows = {row["wall"]: row for row in report["rows"]}
    assert rows["none"]["trees_changed"] == 1.0
    assert [rows[wall]["trees_changed"] for wall in ("name", "key", "no keys")] == [0.0, 0.0, 0.0]
    assert [rows[wall]["by_steps"] for wall in ("name", "key")] == pytest.approx([report["summary"]["chance"]] * 2)


# A short soak of a real server, and the line through what memory was seen.


@pytest.mark.slow
def test_a_soak_counts_all_that_happened(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("\n".join(written_prompts()))
    tiny = write_dummy("tiny", tmp_path / "tiny")
    code, output = run(
        *("soak", "--model", tiny, "--prompts", prompts, "--out", out, "--state-dir", tmp_path / "state"),
        *("--minutes", 0.02, "--clients", 4, "--load-seconds", 0.4, "--max-tokens", 24),
        *("--device", "cpu", "--threads", 1, "--drafter", "memory", "--budget-policy", "fixed", "--max-budget", 8),
    )
    assert code == 0, output
    report = json.loads(out.read_text())
    summary = report["summary"]
    assert (summary["mismatched_tokens"], summary["failed_requests"], summary["slots_lost"]) == (0, 0, 0)
    acts = ("stream", "leave", "whole", "refused")
    assert summary["requests"] == sum(row.get(act, 0) for row in report["rows"] for act in acts)
    assert summary["tokens_compared"] > 100
    assert all(row["memory_mib"] > 100 for row in report["rows"])
    assert "growth_upper_mib_per_hour" in output.splitlines()[-1]


def test_growth_is_found_with_its_bound() -> None:
    hours = np.linspace(0, 2, 40)
    noise = np.random.default_rng(0).normal(0, 1, 40)
    filling = np.where(hours < 0.4, 500 * (0.4 - hours), 0)  # caches, at first
    flat, grown = (growth_of(list(hours), list(900 - filling + slope * hours + noise)) for slope in (0, 30))
    assert flat is not None
    assert grown is not None
    assert abs(flat.slope) < flat.upper < 2
    assert 28 < grown.slope < grown.upper < 33
    assert growth_of([0, 1, 2], [1, 2, 3]) is None


@pytest.mark.parametrize(
    ("tokens", "is_complete", "differs"),
    [([1, 2, 3], True, 0), ([1, 2], False, 0), ([1, 2], True, 1), ([1, 9], False, 1), ([1, 2, 3, 4], False, 1)],
)
def test_an_answer_is_compared_as_far_as_it_goes(tokens: list[int], is_complete: bool, differs: int) -> None:
    expected = Received({0: [1, 2, 3]}, {0: "length"}, 3, is_complete=True)
    assert Received({0: tokens}, {0: "length"}, 3, is_complete=is_complete).differs(expected) == differs


def test_another_end_is_another_answer() -> None:
    expected = Received({0: [1]}, {0: "length"}, 1, is_complete=True)
    assert Received({0: [1]}, {0: "stop"}, 1, is_complete=True).differs(expected) == 1


# The layers by themselves, in a rehearsal: every contestant, row count and layer has its figure.


@pytest.mark.parametrize(
    ("name", "section", "contestants"),
    [
        ("gpu-attention", "attention", {"tree attention", "SDPA with a mask", "SDPA with a mask, heads repeated"}),
        ("gpu-linear", "linear", {"one order", "library"}),
    ],
)
def test_a_rehearsal_runs_every_contestant(
    run: Callable[..., tuple[int, str]], tmp_path: Path, name: str, section: str, contestants: set[str]
) -> None:
    out = tmp_path / "gpu.json"
    code, output = run(name, "--dry-run", "--out", out, "--state-dir", tmp_path)
    assert code == 0, output
    rows = json.loads(out.read_text())["rows"]
    assert {row["section"] for row in rows} == {section}
    assert {row["name"] for row in rows} == contestants
    assert {row["at"]["model"] for row in rows} == {"tiny"}
    assert all(row["value"] > 0 for row in rows)
