"""Whoever guesses finds what is there to be found, and nothing where answers look alike."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.side_channel import Trace, row_of


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
