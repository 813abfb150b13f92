"""Bursts are the same for the same seed, and windows count where a fixed budget wins."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.mixed import SIZES, Burst, bursts_of, row_of, summary_of
from service.bench.driver import Answer, Run, TimedStep
from service.bench.experiment import Measure
from tests.service.engine.harness import step_stats

MEASURE = Measure(max_tokens=8, concurrency=1, temperature=0.0, seed=3)


def asked(burst: Burst) -> list[tuple[Sequence[int], int]]:
    return [(request.prompt, request.sampling.max_tokens) for request in burst.requests]


def test_a_seed_makes_the_same_bursts() -> None:
    prompts = [(1, 2), (3,)]
    bursts, again = bursts_of(prompts, 200, MEASURE), bursts_of(prompts, 200, MEASURE)
    assert list(map(asked, bursts)) == list(map(asked, again))
    assert {burst.clients for burst in bursts} == set(SIZES)
    assert {request.sampling.max_tokens for burst in bursts for request in burst.requests} == set(range(1, 17))


def run_of(reasons: list[str], seconds: float) -> Run:
    steps = tuple(TimedStep(replace(step_stats(), budget_reason=reason), 0.1) for reason in reasons)
    return Run((Answer((1, 2, 3)),), steps, seconds)


def test_windows_are_counted_where_the_fixed_budget_wins() -> None:
    reasons = ["suspended"] * 60 + ["cost"] * 70
    slow, fast = (
        row_of(
            Burst(1, ()),
            {"plain": run_of([], 3.0), "fixed:4": run_of([], fixed), "adaptive": run_of(reasons, 2.0)},
        )
        for fixed in (1.9, 1.99)
    )
    assert (slow["windows"], slow["suspended_windows"]) == (2, 1)
    summary = summary_of([slow, fast])
    assert (summary["windows"], summary["windows_where_fixed_wins"]) == (4, 2)
    assert summary["suspended_where_fixed_wins"] == 0.5
    assert summary["adaptive_over_plain"] == 1.5


def test_a_run_prints_and_writes_every_burst(run_tiny: Callable[..., tuple[dict[str, Any], str]]) -> None:
    report, output = run_tiny("mixed", "--bursts", 3, "--max-tokens", 4, "--kv-cache", "40MiB")
    assert len(report["rows"]) == 3
    assert report["summary"]["mismatched_tokens"] == 0
    assert "suspended_where_fixed_wins" in output
