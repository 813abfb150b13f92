"""The speed measurement: fair order, honest arithmetic and equal text."""

import itertools
from dataclasses import replace
from functools import partial

import pytest

from service.assembly import Assembly
from service.bench.driver import Answer, Run, TimedStep, generate
from service.bench.experiment import (
    Measure,
    decode_tokens_per_second,
    plain_engine,
    rotated,
    tau,
    tokens_per_second,
    warm_up,
)
from service.bench.speed import contestants_of, measure_set
from service.prompts import PromptSet
from tests.service.bench.parts import varied_prompts
from tests.service.bench.test_load import STEP

PROMPTS = PromptSet("some", tuple(tuple(prompt) for prompt in varied_prompts()[:5]))


def timed(prompt_tokens: int, emitted: int, seconds: float, draft_seconds: float) -> TimedStep:
    stats = replace(STEP, prompt_tokens=prompt_tokens, emitted_tokens=emitted, draft_seconds=draft_seconds)
    return TimedStep(stats, seconds)


def test_the_arithmetic_of_a_run() -> None:
    answer = Answer((1, 2, 3, 4, 5), "", "length", (2, 0))
    run = Run((answer,), (timed(10, 1, 3.0, 0.0), timed(0, 3, 0.5, 0.25), timed(0, 1, 0.5, 0.25)), 4.0)
    assert tokens_per_second([run, run]) == 1.25
    assert decode_tokens_per_second([run]) == 4.0
    assert tau([run]) == 2.0


@pytest.mark.parametrize("count", [2, 3])
def test_everybody_is_first_equally_often(count: int) -> None:
    orders = [rotated("abc"[:count], turn) for turn in range(2 * count)]
    assert all(sorted(order) == sorted("abc"[:count]) for order in orders)
    assert sorted(order[0] for order in orders) == sorted("abc"[:count] * 2)
    followers = {(first, second) for order in orders for first, second in itertools.pairwise(order)}
    assert len(followers) == count * (count - 1)


@pytest.mark.parametrize(("temperature", "concurrency"), [(0.0, 1), (1.0, 2)])
def test_speculation_gives_the_same_tokens(assembly: Assembly, temperature: float, concurrency: int) -> None:
    measure = Measure(temperature, 24, concurrency, seed=3)
    peer = partial(generate, plain_engine(assembly))
    contestants = contestants_of(replace(assembly, costs=None), {"other": peer})  # a fixed budget
    warm_up(contestants, PROMPTS.prompts[0], measure)
    done: list[int] = []
    row = measure_set(PROMPTS, contestants, measure, done.append)
    assert row["mismatched_tokens"] == 0
    assert (row["set"], row["prompts"], row["tokens"]) == ("some", 5, 5 * 24)
    assert sum(done) == 5
    assert row["tau"] >= 1
    assert sum(row["accepted_by_source"].values()) > 0
    assert 0 <= row["draft_share"] < 1
    assert row["speedup"] == row["speculative_tokens_per_second"] / row["plain_tokens_per_second"]
    assert list(row["peers"]) == ["other"]
    assert row["over_peers"] == {
        "other": {name: row[f"{name}_tokens_per_second"] / row["peers"]["other"] for name in ("plain", "speculative")}
    }
