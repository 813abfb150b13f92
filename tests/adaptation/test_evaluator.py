"""Each replay is done once, and what is remembered is never another drafter's score."""

from pathlib import Path

import pytest
import torch

from adaptation.evaluator import AnchorDistance, Gate, OfflineEvaluator, replay_of
from adaptation.losses import TextDivergence, untrained_rows
from adaptation.samples import ValidationText, example_of
from adaptation.weights import DrafterWeights
from drafters.specblock.checkpoint import weights_of
from drafters.specblock.model import SpecBlock
from drafters.training.corpus import Example
from drafters.training.replay import replay_blocks
from tests.adaptation.samples import EMBED, drafter, feedback
from tests.adaptation.test_weights import train, weights_in

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("impatient")


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


def evaluator_of(
    folder: Path, replay: Counted, *, least: int = 4, known: int = 100
) -> tuple[OfflineEvaluator, DrafterWeights]:
    weights = weights_in(folder, drafter())
    gate = Gate(min_texts=least, alpha=0.5, judgements=1)
    return OfflineEvaluator(weights, gate, replay, max_scores=known), weights


def test_only_what_is_not_known_is_replayed(tmp_path: Path) -> None:
    replay = Counted()
    evaluator, weights = evaluator_of(tmp_path, replay)
    texts = [text(number) for number in range(4)]
    evaluator.evaluate(texts)
    assert replay.calls == 8, "what serves is the anchor"
    evaluator.evaluate(texts)
    assert replay.calls == 12
    train(weights, 1)
    weights.publish({})
    weights.between_steps()
    evaluator.evaluate(texts)
    assert replay.calls == 20


def test_what_was_judged_and_published_is_not_replayed_again(tmp_path: Path) -> None:
    replay = Counted()
    evaluator, weights = evaluator_of(tmp_path, replay)
    texts = [text(number) for number in range(4)]
    train(weights, 1)
    evaluator.evaluate(texts)
    weights.publish({})
    evaluator.published()
    before = replay.calls
    assert evaluator.serving(texts) == [first_weight(weights.training, texts[0].example)] * 4
    assert replay.calls == before
    weights.between_steps()
    weights.restore(0)
    weights.between_steps()
    assert evaluator.serving(texts) == [first_weight(weights.anchor, texts[0].example)] * 4


def test_scores_are_those_of_the_weights_they_are_said_to_be_of(tmp_path: Path) -> None:
    evaluator, weights = evaluator_of(tmp_path, Counted())
    texts = [text(number) for number in range(4)]
    anchor = first_weight(weights.anchor, texts[0].example)
    train(weights, 1)
    published = first_weight(weights.training, texts[0].example)
    assert evaluator.serving(texts) == [anchor] * 4
    weights.publish({})
    weights.between_steps()
    train(weights, 2)
    decision, seconds = evaluator.evaluate(texts)
    assert decision.candidate_mean == pytest.approx(first_weight(weights.training, texts[0].example))
    assert (decision.serving_mean, decision.anchor_mean) == pytest.approx((published, anchor))
    assert seconds > 0
    scored = evaluator.scored(text(9), with_previous=True)
    assert (scored.serving, scored.anchor, scored.before) == (published, anchor, anchor)
    assert evaluator.scored(text(9), with_previous=False).before is None


def test_too_few_texts_are_not_replayed_at_all(tmp_path: Path) -> None:
    replay = Counted()
    evaluator, _ = evaluator_of(tmp_path, replay, least=5)
    assert evaluator.evaluate([text(number) for number in range(4)])[0].reason == "too_little_evidence"
    assert replay.calls == 0


def test_what_the_newest_texts_find_worse_is_replayed_no_further(tmp_path: Path) -> None:
    replay = Counted()
    evaluator, weights = evaluator_of(tmp_path, replay)
    texts = [text(number) for number in range(10)]
    for change, calls in ((-1.0, 4), (1.0, 10)):
        with torch.no_grad():
            weights.training.lm_head.weight[0, 0] += change
            weights.training.lm_head.weight[0, 0] += change
        evaluator.serving(texts)
        evaluator.anchor(texts)
        before = replay.calls
        decision, _ = evaluator.evaluate(texts)
        assert replay.calls - before == calls
        assert decision.num_texts == calls


def test_what_is_known_is_bounded(tmp_path: Path) -> None:
    replay = Counted()
    evaluator, _ = evaluator_of(tmp_path, replay, known=2)
    for number in (0, 1, 2, 1, 2):
        evaluator.anchor([text(number)])
    assert replay.calls == 3
    evaluator.anchor([text(0)])
    assert replay.calls == 4


def test_a_drafter_in_bf16_can_be_replayed() -> None:
    assert 1.0 <= replay_of(EMBED, beside_memory=False)(drafter().to(torch.bfloat16), text(0).example) <= 9.0


def test_replays_are_those_of_the_drafters() -> None:
    model, example = drafter(), text(0).example
    assert (
        replay_of(EMBED, beside_memory=False)(model, example)
        == replay_blocks(model, EMBED, example, every=2, nodes=8).tau
    )


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
    measure.forget()
    measure.add(text(9))
    assert measure.value() == distances[-1]
