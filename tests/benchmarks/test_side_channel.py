"""Whoever guesses finds what is there to be found, and nothing where answers look alike."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.side_channel import Look, Trace, guessed, row_of


def runs_of(prompts: int, runs: int, *, tells: bool) -> list[list[Trace]]:
    """Answers whose packets are larger for later prompts, or alike."""
    rng = np.random.default_rng(0)

    def trace(prompt: int) -> Trace:
        sizes = rng.integers(100, 120, size=20) + 5 * prompt * tells
        return Trace(tuple(sizes.tolist()), tuple(np.cumsum(rng.uniform(0.01, 0.02, 20)).tolist()), "")

    return [[trace(prompt) for prompt in range(prompts)] for _ in range(runs)]


def test_what_sizes_tell_is_found_and_chance_is_not_beaten() -> None:
    told, silent = (row_of("x", runs_of(10, 12, tells=tells), 8) for tells in (True, False))
    assert told["chance"] == 0.1
    assert min(told["nearest"], told["discriminant"]) > 0.6
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
