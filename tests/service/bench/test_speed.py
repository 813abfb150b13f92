"""The speed measurement: fair order, honest arithmetic and equal text."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from service.assembly import Assembly
from service.bench.driver import Answer, Run, TimedStep, generate
from service.bench.experiment import (
    Measure,
    decode_tokens_per_second,
    rotated,
    tau,
    tokens_per_second,
    warm_up,
)
from service.bench.lossless import (
    BUILT_IN,
    COMPANIES,
    EXTRAS,
    PREFILL_CHUNKS,
    TEMPERATURES,
    WAYS,
    Case,
    Way,
    check,
    ordered_cases,
    pairs_of,
)
from service.bench.speed import contestants_of, measure_set
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest
from service.errors import StartupError
from service.text.prompts import PromptSet, read_prompt_set
from tests.service.bench.parts import STEP, varied_prompts

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
def test_each_contestant_is_first_equally_often(count: int) -> None:
    orders = [rotated("abc"[:count], turn) for turn in range(2 * count)]
    assert all(sorted(order) == sorted("abc"[:count]) for order in orders)
    assert sorted(order[0] for order in orders) == sorted("abc"[:count] * 2)
    followers = {(first, second) for order in orders for first, second in itertools.pairwise(order)}
    assert len(followers) == count * (count - 1)


@pytest.mark.parametrize(("temperature", "concurrency"), [(0.0, 1), (1.0, 2)])
def test_speculation_gives_the_same_tokens(assembly: Assembly, temperature: float, concurrency: int) -> None:
    measure = Measure(temperature, 24, concurrency, seed=3)
    contestants = contestants_of(replace(assembly, costs=None))  # a fixed budget
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


# The lossless check: its cases, what it compares, what it counts, and that it can fail.

DIMENSIONS = (TEMPERATURES, EXTRAS, WAYS, COMPANIES, PREFILL_CHUNKS)
CASE = Case(1.0, "none", Way("random", 16), "among 15", 17)
SHORT = Case(1.0, "none", Way("none", 0), "short of slots", 64)


def test_nothing_differs_and_all_is_counted(assembly: Assembly) -> None:
    heard: list[int] = []
    result = check(assembly, varied_prompts(), num_tokens=2000, answer_tokens=40, advance=heard.append)
    assert result.total.mismatched_tokens == 0
    assert result.first is None
    assert result.holds
    assert sum(heard[:-1]) < 2000 <= result.total.tokens_compared
    assert [tally.tokens_compared for _, tally in result.cases] == heard


def test_random_trees_around_a_mostly_right_prediction_are_accepted_in_part(assembly: Assembly) -> None:
    result = check(assembly, varied_prompts(), num_tokens=300, answer_tokens=40, cases=[CASE])
    assert 0.2 * result.total.tokens_compared < result.total.accepted_tokens < 0.9 * result.total.tokens_compared


def test_scarce_slots_preempt(assembly: Assembly) -> None:
    result = check(assembly, varied_prompts(), num_tokens=300, cases=[SHORT])
    assert result.total.preemptions > 0
    assert [case for case, _ in result.cases] == [SHORT]
    assert result.holds


def test_one_wrong_token_is_found(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(
        engine: Engine, requests: list[GenerationRequest], before_step: Callable[[int], None] = lambda number: None
    ) -> Run:
        run = generate(engine, requests, before_step=before_step)
        if len(requests) == 1:
            return run
        answer = run.answers[3]
        answers = list(run.answers)
        answers[3] = Answer((*answer.token_ids[:7], -1, *answer.token_ids[8:]), answer.text, "length", ())
        return Run(tuple(answers), run.steps, run.seconds)

    monkeypatch.setattr("service.bench.lossless.generate", spoilt)
    result = check(assembly, varied_prompts(), num_tokens=1, answer_tokens=20, cases=[CASE])
    assert result.total.mismatched_tokens == 1
    assert not result.holds
    assert result.first is not None
    assert result.first.position == 7
    assert result.first.case == CASE


def test_a_prompt_that_leaves_no_room_is_refused(assembly: Assembly) -> None:
    with pytest.raises(StartupError, match="the lossless check: a prompt of 250 tokens"):
        check(assembly, [[1] * 250], num_tokens=1)


def test_the_built_in_prompts_are_many_and_of_many_lengths(assembly: Assembly) -> None:
    lengths = sorted(map(len, read_prompt_set(BUILT_IN, assembly.tokenizer).prompts))
    assert len(lengths) == 24
    assert 20 * lengths[0] < lengths[-1]


def test_every_pair_of_choices_comes_in_the_first_forty_eight_cases() -> None:
    num_pairs = sum(len(a) * len(b) for a, b in itertools.combinations(DIMENSIONS, 2))
    for seed in range(3):
        met = set().union(*(pairs_of(case) for case in ordered_cases(seed)[:48]))
        assert len(met) == num_pairs
