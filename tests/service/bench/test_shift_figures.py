"""The arithmetic of the shift benchmark, on turns made by hand."""

import json
from dataclasses import replace

import pytest

from service.bench.shift_figures import Window, net_gain, recovery_of, rows_of, summary_of, windows_of
from service.bench.shift_play import AnsweredQuery, Counts, Played, turns_of
from tests.service.bench.shift_parts import played, publish, stream_of_halves

STREAM = stream_of_halves(80)
TURNS = turns_of(STREAM, 5)
EASE = [4, 6, 2, 8, 4, 4, 2, 6, 8, 2, 6, 4, 4, 8, 2, 6]  # how much of each turn's prompts is easy to predict


def turns_with(learnt: list[int], *, seconds: float = 1.0) -> list[Played]:
    pairs = zip(TURNS, EASE, learnt, strict=True)
    return [played(turn, accepted=ease + more, seconds=seconds) for turn, ease, more in pairs]


PLAIN = turns_with([0] * 16)


def windows(turns: list[Played]) -> list[Window]:
    return windows_of(turns)[8:]


def test_recovery_is_counted_to_the_first_window_near_the_end() -> None:
    mine = windows(turns_with([0] * 8 + [1, 1, 2, 4, 9, 10, 11, 11]))
    recovery = recovery_of(mine, windows(PLAIN))
    assert recovery.final_gain == 10 / 4
    assert recovery.queries == 6 * 5  # the sixth window is the first that is 9 / 4 above the first one


def test_how_easy_prompts_are_cancels() -> None:
    harder = [played(turn, accepted=2 * ease) for turn, ease in zip(TURNS, EASE, strict=True)]
    more = [played(turn, accepted=2 * ease + 4) for turn, ease in zip(TURNS, EASE, strict=True)]
    recovery = recovery_of(windows(more), windows(harder))
    assert (recovery.final_gain, recovery.queries) == (0.0, None)


def test_nothing_gained_is_no_recovery() -> None:
    recovery = recovery_of(windows(turns_with([0] * 8 + [3, 2, 1, 0, 0, 0, 0, 0])), windows(PLAIN))
    assert recovery.final_gain == -3 / 4
    assert recovery.queries is None


def test_the_gain_is_paired_and_has_an_interval() -> None:
    slow_minutes = [1.0 + 4 * (number % 3 == 0) for number in range(16)]
    plain = [played(turn, accepted=0, seconds=s) for turn, s in zip(TURNS, slow_minutes, strict=True)]
    mine = [played(turn, accepted=0, seconds=s / 1.25) for turn, s in zip(TURNS, slow_minutes, strict=True)]
    exact = net_gain(mine, plain, seed=0)
    assert (exact.percent, exact.low, exact.high) == pytest.approx((25, 25, 25))
    noisy = [played(t.turn, accepted=0, seconds=t.net_seconds * (0.9, 1.3)[t.turn.number % 2]) for t in mine]
    gain = net_gain(noisy, plain, seed=0)
    assert gain.low < gain.percent < gain.high
    assert gain == net_gain(noisy, plain, seed=0)


def test_rows_are_windows() -> None:
    counts = Counts(training_seconds=0.5, updates_head=1, publishes=1)
    mine = [played(turn, accepted=4, seconds=2.0, engine_seconds=1.0, counts=counts) for turn in TURNS]
    rows = rows_of("bandit", windows_of(mine), STREAM)
    assert [row["queries"] for row in rows] == [5] * 16
    assert [row["first_query"] for row in rows] == list(range(0, 80, 5))
    assert [row["phase"] for row in rows] == ["old"] * 8 + ["new"] * 8
    last = rows[-1]
    assert (last["tau"], last["tokens_per_second"], last["engine_tokens_per_second"]) == (2.0, 20.0, 40.0)
    assert list(last) == [
        *(
            "policy",
            "window",
            "phase",
            "first_query",
            "queries",
            "tau",
            "tokens_per_second",
            "engine_tokens_per_second",
        ),
        *("training_seconds", "updates_head", "updates_full", "publishes", "refusals", "rollbacks"),
    ]
    assert [last[name] for name in ("training_seconds", "updates_head", "updates_full", "publishes")] == [0.5, 1, 0, 1]


def test_a_window_may_hold_several_turns() -> None:
    stream = stream_of_halves(400)
    turns = turns_of(stream, 5)
    mine = windows_of([played(turn, accepted=turn.number % 2 * 4) for turn in turns])
    assert len(mine) < len(turns) / 2
    assert sum(window.num_queries for window in mine) == 400
    assert [window.first for window in mine] == sorted(window.first for window in mine)


def test_the_summary_of_a_policy() -> None:
    counts = Counts(training_seconds=0.25, updates_full=1, refusals=1)
    mine = [
        played(
            turn,
            accepted=ease + (turn.phase and 2),
            seconds=1.0 if turn.phase else 1.25,
            counts=counts,
            noted=(publish(turn.first + 1, gain=float("nan"), seconds=0.5),),
            gaps=(0.01, 0.03),
        )
        for turn, ease in zip(TURNS, EASE, strict=True)
    ]
    summary = summary_of(mine, PLAIN, STREAM, seed=0)
    assert (summary.net_tokens_per_second_before, summary.net_tokens_per_second_after) == (32.0, 40.0)
    assert summary.engine_tokens_per_second_after == 80.0
    assert summary.net_gain_before is not None
    assert summary.net_gain_after is not None
    assert summary.net_gain_before.percent == pytest.approx(-20)
    assert summary.net_gain_after.percent == 0.0
    assert summary.tau_after - summary_of(PLAIN, PLAIN, STREAM, seed=0).tau_after == 0.5
    assert (summary.final_tau_gain, summary.recovery_queries) == (0.0, None)
    assert summary.counts == Counts(training_seconds=4.0, updates_full=16, refusals=16)
    assert summary.training_share == 4.0 / 18.0
    assert summary.waited_seconds == 10.0
    assert (summary.itl_p50_seconds, summary.itl_p99_seconds) == pytest.approx((0.02, 0.03))
    as_json = json.loads(json.dumps(summary.as_json(), allow_nan=False))
    assert as_json["updates_full"] == 16
    assert as_json["events"][3] == {
        "query": 16,
        "kind": "published",
        "version": 1,
        "reason": "better",
        "numbers": {"gain": None, "seconds": 0.5},
    }


def test_only_what_was_published_can_have_recovered_anything() -> None:
    better = turns_with([0] * 8 + [1, 1, 2, 4, 9, 10, 11, 11])
    by_chance = summary_of(better, PLAIN, STREAM, seed=0)
    assert (by_chance.final_tau_gain, by_chance.recovery_queries) == (10 / 4, None)
    learnt = [replace(turn, counts=Counts(publishes=1)) for turn in better]
    assert summary_of(learnt, PLAIN, STREAM, seed=0).recovery_queries == 30


def test_the_plain_comparison_gains_nothing_over_itself() -> None:
    summary = summary_of(PLAIN, PLAIN, STREAM, seed=0)
    assert (summary.net_gain_before, summary.net_gain_after) == (None, None)
    assert (summary.final_tau_gain, summary.recovery_queries, summary.mismatched_tokens) == (None, None, 0)


def test_every_differing_token_counts() -> None:
    mine = list(PLAIN)
    other = AnsweredQuery((0, 1, 9, 3, 4, 5), 4, 4)  # one differs and two are missing
    mine[7] = Played(TURNS[7], (*PLAIN[7].queries[:4], other), (), 0.5, 1.0, Counts(), ())
    assert summary_of(mine, PLAIN, STREAM, seed=0).mismatched_tokens == 3
