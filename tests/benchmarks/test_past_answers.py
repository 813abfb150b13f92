"""Past answers are found where there is no wall, and nothing of them across one."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.past_answers import Seen, told


def test_the_one_that_saves_most_is_guessed_and_equals_share() -> None:
    before = [Seen(1.0, 9, [{"a"}]), Seen(1.0, 9, [{"a"}])]
    seen = [Seen(1.1, 9, [{"a"}]), Seen(0.5, 9, [{"b"}])]
    assert told(seen, before, 1) == {"by_seconds": 1.0, "by_steps": 0.5, "trees_changed": 0.5}
    assert told(seen, before, 0) == {"by_seconds": 0.0, "by_steps": 0.5, "trees_changed": 0.5}


def test_walls_leave_chance(run_tiny: Callable[..., tuple[dict[str, Any], str]]) -> None:
    report, _ = run_tiny("past-answers", "--limit", 3, "--max-tokens", 24, "--budget-policy", "fixed")
    rows = {row["wall"]: row for row in report["rows"]}
    assert rows["none"]["trees_changed"] == 1.0
    assert [rows[wall]["trees_changed"] for wall in ("name", "key", "no keys")] == [0.0, 0.0, 0.0]
    assert [rows[wall]["by_steps"] for wall in ("name", "key")] == pytest.approx([report["summary"]["chance"]] * 2)
