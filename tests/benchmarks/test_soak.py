"""A short soak of a real server, and the line through what memory was seen."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.checkpoint import write_dummy
from benchmarks.soak import growth_of, loads_of
from benchmarks.streams import Received
from tests.service.bench.parts import written_prompts


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


def test_loads_go_up_to_the_most() -> None:
    assert loads_of(16) == (1, 4, 8, 16)
    assert loads_of(1) == (1,)


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
