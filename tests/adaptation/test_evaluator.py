"""Each replay is done once, and what is remembered is never another drafter's score."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptation.config import Tuning
from adaptation.evaluator import AnchorDistance, OfflineEvaluator, TextDivergence, replay_of, untrained_rows
from adaptation.publisher import Gate, GateDecision, judged, t_quantile
from adaptation.samples import ValidationText, example_of
from adaptation.timing import completed
from adaptation.weights import DrafterWeights
from drafters.network.checkpoint import weights_of
from drafters.network.model import SpecBlock
from drafters.training.corpus import Example
from tests.adaptation.samples import EMBED, drafter, feedback
from tests.adaptation.streams import Texts
from tests.adaptation.test_weights import publish, train, weights_in


def text(number: int) -> ValidationText:
    example = example_of(feedback(number))
    assert example is not None
    return ValidationText(number, example)


def first_weight(model: SpecBlock, _: Example) -> float:
    """A score that tells which weights were asked."""
    return model.lm_head.weight[0, 0].item()


class Counted:
    """A replay that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: SpecBlock, example: Example) -> float:
        self.calls += 1
        return first_weight(model, example)


def evaluator_of(folder: Path, replay: Counted, *, known: int = 100) -> tuple[OfflineEvaluator, DrafterWeights]:
    weights = weights_in(folder, drafter())
    return OfflineEvaluator(weights, replay, max_scores=known), weights


def judge(evaluator: OfflineEvaluator, texts: list[ValidationText], *, least: int = 4) -> GateDecision:
    return completed(judged(Gate(min_texts=least, alpha=0.5, judgements=1), evaluator, texts))


def test_only_what_is_not_known_is_replayed(tmp_path: Path) -> None:
    replay = Counted()
    evaluator, weights = evaluator_of(tmp_path, replay)
    texts = [text(number) for number in range(4)]
    judge(evaluator, texts)
    assert replay.calls == 8, "what serves is the anchor"
    judge(evaluator, texts)
    assert replay.calls == 12
    publish(weights, 1)
    judge(evaluator, texts)
    assert replay.calls == 20


def test_scores_are_those_of_the_weights_they_name(tmp_path: Path) -> None:
    evaluator, weights = evaluator_of(tmp_path, Counted())
    texts = [text(number) for number in range(4)]
    anchor = first_weight(weights.anchor, texts[0].example)
    train(weights, 1)
    published = first_weight(weights.training, texts[0].example)
    assert completed(evaluator.serving(texts)) == [anchor] * 4
    weights.publish({})
    weights.between_steps()
    train(weights, 2)
    decision = judge(evaluator, texts)
    assert decision.candidate_mean == pytest.approx(first_weight(weights.training, texts[0].example))
    assert (decision.serving_mean, decision.anchor_mean) == pytest.approx((published, anchor))
    scored = completed(evaluator.scored(text(9), with_previous=True))
    assert (scored.serving, scored.anchor, scored.before) == (published, anchor, anchor)
    assert completed(evaluator.scored(text(9), with_previous=False)).before is None


def test_too_few_texts_are_not_replayed_at_all(tmp_path: Path) -> None:
    replay = Counted()
    evaluator, _ = evaluator_of(tmp_path, replay)
    assert judge(evaluator, [text(number) for number in range(4)], least=5).reason == "too_little_evidence"
    assert replay.calls == 0


def test_what_the_newest_texts_find_worse_is_replayed_no_further(tmp_path: Path) -> None:
    replay = Counted()
    evaluator, weights = evaluator_of(tmp_path, replay)
    texts = [text(number) for number in range(10)]
    for change, calls in ((-1.0, 4), (1.0, 10)):
        with torch.no_grad():
            weights.training.lm_head.weight[0, 0] += change
            weights.training.lm_head.weight[0, 0] += change
        completed(evaluator.serving(texts))
        completed(evaluator.anchor(texts))
        before = replay.calls
        decision = judge(evaluator, texts)
        assert replay.calls - before == calls
        assert decision.num_texts == calls


def test_what_is_known_is_bounded(tmp_path: Path) -> None:
    replay = Counted()
    evaluator, _ = evaluator_of(tmp_path, replay, known=2)
    for number in (0, 1, 2, 1, 2):
        completed(evaluator.anchor([text(number)]))
    assert replay.calls == 3
    completed(evaluator.anchor([text(0)]))
    assert replay.calls == 4


def test_a_drafter_in_bf16_can_be_replayed() -> None:
    assert 1.0 <= replay_of(EMBED)(drafter().to(torch.bfloat16), text(0).example) <= 9.0


def test_drift_is_that_of_the_first_texts_zero_for_the_anchor_and_grows_with_distance(tmp_path: Path) -> None:
    weights = weights_in(tmp_path, drafter())
    divergence = TextDivergence(weights.anchor, EMBED, untrained_rows(weights.anchor, None), anchors=8)
    measure = AnchorDistance(weights, divergence, num_texts=3)
    measured: list[float | None] = []
    for number in range(4):
        measured.append(measure.value())
        measure.add(text(number))
    assert measured == [None, None, None, 0.0]
    distances = [0.0]
    for size in (0.05, 0.2):
        moved, noise = {}, torch.Generator().manual_seed(0)
        for name, value in weights_of(drafter()).items():
            random = torch.randn(value.shape, generator=noise)
            moved[name] = value + size * random if value.is_floating_point() else value
        weights.adopt(moved)
        distance = measure.value()
        assert distance is not None
        assert not measure.is_due, "measured once per version"
        distances.append(distance)
    assert distances == sorted(set(distances))
    measure.anchor_changed()
    measure.add(text(9))
    assert measure.value() == distances[-1]


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
    published = sum(first_publish(seed, 1.0, count=count) is not None for seed in range(500)) / 500
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


def test_the_numbers_are_reported() -> None:
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
