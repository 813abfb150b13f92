import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptation.config import Tuning
from adaptation.evaluator import Gate, GateDecision, t_quantile
from tests.adaptation.streams import Texts

TUNING = Tuning()
JUDGEMENTS = TUNING.kept_refusals + 1
LEVEL = TUNING.gate_alpha / JUDGEMENTS
GATE = Gate(min_texts=16, alpha=TUNING.gate_alpha, judgements=JUDGEMENTS)


def first_publish(seed: int, quality: float, *, count: int) -> int | None:
    """Which judgement of one training copy publishes it, all on the same texts and none ending the copy early."""
    texts = Texts(seed)
    chances = texts.difficulties(count)
    serving, anchor = texts.scores(chances), texts.scores(chances)
    gate = Gate(min_texts=TUNING.gate_texts, alpha=TUNING.gate_alpha, judgements=JUDGEMENTS)
    candidates = (texts.scores(chances, quality) for _ in range(JUDGEMENTS))
    return next((i for i, candidate in enumerate(candidates) if gate.decide(candidate, serving, anchor).publish), None)


@pytest.mark.parametrize("count", [TUNING.gate_texts, TUNING.validation_texts])
def test_a_copy_that_gains_nothing_is_ever_published_with_at_most_the_stated_probability(count: int) -> None:
    published = sum(first_publish(seed, 1.0, count=count) is not None for seed in range(1000)) / 1000
    assert 0.02 < published < TUNING.gate_alpha


def test_a_copy_that_is_clearly_better_is_published_at_the_first_or_second_judgement() -> None:
    judgements = [first_publish(seed, 1.15, count=TUNING.validation_texts) for seed in range(200)]
    assert sum(judgement in (0, 1) for judgement in judgements) > 190


@pytest.mark.parametrize("freedom", [7, 15, 23, 200])
@pytest.mark.parametrize("level", [LEVEL, 0.05, 0.5])
def test_quantiles_are_those_of_students_t(freedom: int, level: float) -> None:
    points = torch.linspace(0, t_quantile(1.0 - level, freedom), 10_001, dtype=torch.float64)
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = (1 + points**2 / freedom) ** (-(freedom + 1) / 2) * math.exp(scale)
    assert 0.5 - float(torch.trapezoid(density, points)) == pytest.approx(level, rel=0.01)


def test_the_numbers_are_told() -> None:
    decision = GATE.decide([2.0, 3.0] * 8, [1.0, 2.5] * 8, [1.0, 1.0] * 8)
    assert decision == GateDecision("better", 16, 2.5, 1.75, 1.0, decision.standard_error, decision.needed)
    assert decision.standard_error == pytest.approx(0.25 * math.sqrt(16 / 15) / 4)
    assert (decision.gain, decision.needed) == (0.75, t_quantile(1.0 - LEVEL, 15) * decision.standard_error)


@pytest.mark.parametrize(
    ("candidate", "serving", "anchor", "reason"),
    [
        ([2.0] * 15, [1.0] * 15, [1.0] * 15, "too_little_evidence"),
        ([], [], [], "too_little_evidence"),
        ([2.0] * 15 + [math.nan], [1.0] * 16, [1.0] * 16, "not_finite"),
        ([2.0] * 15 + [math.inf], [1.0] * 16, [1.0] * 16, "not_finite"),
        ([2.0] * 16, [1.0] * 15 + [math.nan], [1.0] * 16, "not_finite"),
        ([2.0] * 16, [1.0] * 16, [1.0] * 15 + [math.nan], "not_finite"),
        ([1.5] * 16, [2.0] * 16, [1.0] * 16, "worse_than_serving"),
        ([2.0] * 16, [1.5] * 16, [2.5] * 16, "worse_than_anchor"),
        ([2.0] * 16, [2.0] * 16, [1.0] * 16, "within_noise"),
        ([2.3, 1.95] * 8, [2.0, 2.0] * 8, [1.0] * 16, "better"),
        ([2.3, 1.93] * 8, [2.0, 2.0] * 8, [1.0] * 16, "within_noise"),
    ],
)
def test_each_reason(candidate: list[float], serving: list[float], anchor: list[float], reason: str) -> None:
    decision = GATE.decide(candidate, serving, anchor)
    assert decision.reason == reason
    assert decision.publish == (reason == "better")


def test_little_evidence_that_is_no_number_is_refused_too() -> None:
    decision = GATE.decide([math.nan], [1.0], [1.0])
    assert decision.reason == "too_little_evidence"
    assert math.isnan(decision.candidate_mean)
    assert decision.serving_mean == 1.0


@given(st.floats(0, 100), st.lists(st.floats(0, 3), min_size=15, max_size=40), st.integers(0, 14))
def test_no_single_sequence_carries_a_candidate(gain: float, losses: list[float], place: int) -> None:
    differences = [-loss for loss in losses]
    differences.insert(place, gain)
    serving = [5.0] * len(differences)
    candidate = [5.0 + difference for difference in differences]
    assert not GATE.decide(candidate, serving, [0.0] * len(differences)).publish
