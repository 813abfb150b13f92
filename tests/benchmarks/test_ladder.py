"""Requests that arrive by chance: the same for all servers, at the rates that are asked for."""

from benchmarks.ladder import arrivals_of, rows_of
from service.bench.driver import Answer


def test_moments_are_drawn_once_at_their_rates() -> None:
    slow, fast = arrivals_of([0.01, 50.0], 10.0, 3, seed=1)
    assert [len(turn) for turn in slow] == [1, 1, 1]
    assert all(400 < len(turn) < 600 and turn == sorted(turn) and turn[-1] < 10.0 for turn in fast)
    assert arrivals_of([0.01, 50.0], 10.0, 3, seed=1) == [slow, fast]


def test_times_are_compared_request_by_request() -> None:
    of = {
        name: [Answer((1, 2), first_token_seconds=0.5 * factor, gaps_seconds=(0.5 * factor,))] * 4
        for name, factor in (("plain", 1), ("slow", 2))
    }
    plain, slow = rows_of(2.0, of)
    assert (plain["time_over_first"][0], slow["time_over_first"]) == (1.0, (2.0, 2.0, 2.0))
    assert (slow["mean_e2el_ms"], slow["mismatched_tokens"]) == (2000.0, 0)
