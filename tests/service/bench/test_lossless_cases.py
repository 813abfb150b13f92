"""The cases: all of them, each once, every pair of choices early."""

import itertools

import pytest

from service.bench.lossless import (
    COMPANIES,
    EXTRAS,
    PREFILL_CHUNKS,
    SAMPLINGS,
    TEMPERATURES,
    WAYS,
    ordered_cases,
    pairs_of,
    sampling_params,
)

DIMENSIONS = (TEMPERATURES, EXTRAS, WAYS, COMPANIES, PREFILL_CHUNKS)


def test_every_case_comes_once() -> None:
    cases = ordered_cases(0)
    assert len(cases) == len(set(cases)) == 4 * 5 * 5 * 3 * 3


def test_every_pair_of_choices_comes_in_the_first_thirty_cases() -> None:
    num_pairs = sum(len(a) * len(b) for a, b in itertools.combinations(DIMENSIONS, 2))
    for seed in range(3):
        met = set().union(*(pairs_of(case) for case in ordered_cases(seed)[:30]))
        assert len(met) == num_pairs


def test_the_order_follows_the_seed() -> None:
    assert ordered_cases(1) == ordered_cases(1)
    assert ordered_cases(1) != ordered_cases(2)


@pytest.mark.parametrize(("temperature", "extras"), SAMPLINGS)
def test_only_stop_may_end_an_answer_early(temperature: float, extras: str) -> None:
    params = sampling_params(temperature, extras, seed=5, max_tokens=9, stop=("x",))  # type: ignore[arg-type]
    assert (params.temperature, params.seed, params.max_tokens) == (temperature, 5, 9)
    assert params.ignore_eos == (extras != "stop")
    assert params.stop == (("x",) if extras == "stop" else ())
    assert params.has_penalties == (extras == "penalties")
    assert (params.top_p < 1) == (extras == "top_p")
    assert (params.min_p > 0) == (params.top_k > 0) == (extras == "min_p+top_k")
