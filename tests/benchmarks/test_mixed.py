"""Two kinds of requests by turns: what is compared with what, and that a run tells it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mixed import pairs_of, row_of, whole
from service.bench.driver import Span
from service.bench.experiment import Measure
from service.errors import StartupError


def test_the_kinds_alternate_each_with_its_temperature() -> None:
    measures = [Measure(0.0, 8, 1, 3), Measure(1.0, 8, 1, 3)]
    pairs = pairs_of([[(1, 2), (3,)], [(4,), (5,)]], measures, 3)
    asked = [(int(one.request_id), one.prompt, one.sampling.temperature) for pair in pairs for one in pair]
    assert asked == [(0, (1, 2), 0.0), (1, (4,), 1.0), (2, (3,), 0.0), (3, (5,), 1.0), (4, (1, 2), 0.0), (5, (4,), 1.0)]


def test_a_row_compares_tokens_per_second() -> None:
    mine, others = [Span(1.0, 30), Span(1.0, 30)], [Span(2.0, 30), Span(2.0, 30)]
    assert row_of("one at a time", "this over that", mine, others)["ratio"] == (2.0, 2.0, 2.0)
    assert whole([mine, others]) == [Span(1.0, 60), Span(1.0, 60)]


def test_a_run_compares_all_parts(run_tiny: Callable[..., tuple[dict[str, Any], str]], tmp_path: Path) -> None:
    words = ("--requests", 8, "--max-tokens", 4, "--concurrency", 2, "--kv-cache", "80MiB")
    report, output = run_tiny("mixed", "--prompts", tmp_path / "prompts.jsonl", *words)
    assert [row["part"] for row in report["rows"]] == ["one at a time"] * 4 + ["second start"] * 2 + ["2 at a time"] * 6
    assert report["summary"]["mismatched_tokens"] == 0
    assert "both kinds over alone" in output


def test_one_prompt_file_is_refused(run_tiny: Callable[..., tuple[dict[str, Any], str]]) -> None:
    with pytest.raises(StartupError, match="two prompt files"):
        run_tiny("mixed")
