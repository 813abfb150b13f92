"""Watched and unwatched turns give the same tokens, and what is watched is really read."""

from collections.abc import Callable
from typing import Any

from benchmarks.observing import Seen, Turn, rows_of


def turn(watched: bool, seconds: float, *answers: tuple[int, ...]) -> Turn:
    return Turn(watched, answers, seconds, Seen(3, 2) if watched else Seen())


def test_each_way_has_a_row_of_all_its_turns() -> None:
    turns = [
        turn(False, 2.0, (1, 2), (3, 4)),
        turn(True, 4.0, (1, 2), (3, 5)),
        turn(True, 2.0, (1, 2), (3, 4)),
        turn(False, 2.0, (1, 2), (3, 4)),
    ]
    unwatched, watched = rows_of(turns)
    assert (unwatched.watched, unwatched.turns, unwatched.tokens_per_second) == (False, 2, 2.0)
    assert (watched.watched, watched.turns, watched.tokens_per_second) == (True, 2, 8 / 6)
    assert (unwatched.mismatched_tokens, watched.mismatched_tokens) == (0, 1)
    assert (unwatched.scrapes, watched.scrapes, watched.moments) == (0, 6, 4)


def test_a_run_prints_and_writes_both_ways(run_tiny: Callable[..., tuple[dict[str, Any], str]]) -> None:
    report, output = run_tiny(
        *("observing", "--limit", 2, "--max-tokens", 16, "--streams", 2, "--turns", 1, "--kv-cache", "10MiB"),
        *("--budget-policy", "fixed", "--max-budget", 4),
    )
    rows = {row["watched"]: row for row in report["rows"]}
    assert [rows[way]["tokens"] for way in (False, True)] == [32, 32]
    assert rows[True]["scrapes"] >= 1
    assert rows[True]["moments"] >= 1
    assert (rows[False]["scrapes"], rows[False]["moments"]) == (0, 0)
    assert report["summary"]["mismatched_tokens"] == 0
    assert report["summary"]["watched_to_unwatched"] > 0
    assert report["conditions"]["commit"]
    assert "of unwatched" in output
