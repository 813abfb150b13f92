"""The benchmarks of what requests and clients share, on a tiny model."""

from dataclasses import replace

from benchmarks.neighbours import NeighbourRow, Neighbours, slowdown
from benchmarks.prefix import measure, prompts_alike, row_of
from service.assembly import Assembly
from tests.tiny_models import random_prompts


def test_later_prompts_are_found_and_answered_alike(assembly: Assembly) -> None:
    prompts = prompts_alike([[number, *end] for number, end in enumerate(random_prompts(5, 9))], 5, 60)
    assert len({tuple(prompt[:60]) for prompt in prompts}) == 1
    ways = [assembly.engine(limits=replace(assembly.limits, prefix_cache=way)) for way in (False, True)]
    read, kept = (measure(engine, prompts, max_tokens=6) for engine in ways)
    assert [one.cached_tokens for one in kept] == [0, 59, 59, 59, 59]
    row = row_of(kept, read, prefix_cache=True, shared_tokens=60)
    assert (row.requests, row.cached_tokens, row.mismatched_tokens) == (5, 4 * 59, 0)
    wrong = [replace(one, tokens=(*one.tokens[:-1], -1)) for one in kept]
    assert row_of(wrong, read, prefix_cache=True, shared_tokens=60).mismatched_tokens == 5


def test_a_quiet_client_is_measured_beside_a_busy_one(assembly: Assembly) -> None:
    engine = assembly.engine()
    row = Neighbours(engine, list(random_prompts(4, 12)), max_tokens=5).run(quiet=1, busy=3, answers=4)
    assert row.answers == 4
    assert 0 < row.ttft_p95_seconds <= row.latency_p95_seconds
    assert 0 < row.quiet_tokens_per_second < row.tokens_per_second
    assert engine.idle


def test_slowdown_compares_loaded_turns_with_quiet_ones() -> None:
    def turn(busy: int, p95: float) -> NeighbourRow:
        return NeighbourRow(
            quiet_streams=1,
            busy_streams=busy,
            answers=2,
            latency_p50_seconds=p95,
            latency_p95_seconds=p95,
            ttft_p95_seconds=p95,
            tokens_per_second=1,
            quiet_tokens_per_second=1,
        )

    assert slowdown([turn(0, 1.0), turn(9, 2.0), turn(0, 3.0), turn(9, 4.0)]) == 1.5
