"""Traffic that changes while nobody drafts is noticed by replays, and replays take a small share of the time."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch

from adaptation.evaluator import OfflineEvaluator
from adaptation.samples import ValidationText, example_of
from adaptation.traffic import AnchorScoreChange
from tests.adaptation.samples import bench, feedback, undrafted, vocabulary

torch.set_num_threads(1)
EXAMPLE = example_of(feedback(0))


@dataclass
class Replays:
    """Texts of a known difficulty, each replayed in so many seconds."""

    seconds: float = 0.0
    now: float = 0.0
    tau: float = 2.0
    once: int = 0
    kept: list[int] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def anchor(self, texts: list[ValidationText]) -> list[float]:
        self.kept += [text.number for text in texts]
        return [self.rng.gauss(self.tau, 0.3) for _ in texts]

    def anchor_once(self, text: ValidationText) -> float:
        self.once += 1
        self.now += self.seconds
        return self.rng.gauss(self.tau, 0.3)


def asked(replays: Replays) -> AnchorScoreChange:
    return AnchorScoreChange(cast(OfflineEvaluator, replays), clock=lambda: replays.now)


def text(number: int) -> ValidationText:
    assert EXAMPLE is not None
    return ValidationText(number, EXAMPLE)


@pytest.mark.parametrize("validates", [False, True])
def test_other_texts_are_noticed_though_nobody_drafts(validates: bool) -> None:
    replays = Replays()
    texts = asked(replays)
    assert not any(texts.observe(text(number), validates=validates) for number in range(60))
    replays.tau = 1.3
    found = [texts.observe(text(number), validates=validates) for number in range(20)].index(True)
    assert found < 10
    assert (len(replays.kept), replays.once) == ((80, 0) if validates else (0, 80))


def test_replays_take_a_small_share_of_the_time() -> None:
    replays = Replays(seconds=0.05)
    texts = asked(replays)
    for number in range(10_000):
        texts.observe(text(number), validates=False)
        replays.now += 0.01
    assert 0.01 < 0.05 * replays.once / replays.now <= 0.02


def test_a_suspicion_is_half_the_evidence() -> None:
    found = []
    for suspects in (False, True):
        replays = Replays()
        texts = asked(replays)
        for number in range(60):
            texts.observe(text(number), validates=True)
        replays.tau = 1.3
        if suspects:
            texts.change.suspect()
        found.append([texts.observe(text(number), validates=True) for number in range(20)].index(True))
    assert found[1] < found[0]


def test_what_others_have_noticed_is_not_noticed_again() -> None:
    replays = Replays()
    texts = asked(replays)
    for number in range(60):
        texts.observe(text(number), validates=True)
    replays.tau = 1.3
    texts.change.reset()
    assert not any(texts.observe(text(number), validates=True) for number in range(100))


def test_a_learner_at_rest_looks_closely_when_nobody_drafts_any_more(tmp_path: Path) -> None:
    tried = bench(tmp_path, policy="never")
    attention = tried.learner.sampler
    for seed in range(40):
        tried.learner.observe(feedback(seed, accepted=(1, 2, 0, 1) * 4))
        attention.rest(True)
    assert attention.resting
    for seed in range(10):
        tried.learner.observe(undrafted(100 + seed))
    attention.rest(True)
    assert not attention.resting


def test_a_learner_for_which_nobody_drafts_judges_new_traffic_by_itself(tmp_path: Path) -> None:
    tried = bench(tmp_path, policy="never", validation_share=0.25, validation_texts=24)
    for seed in range(80):
        tried.learner.observe(undrafted(seed))
    assert "changed" not in tried.kinds()
    easy = next(token for token in vocabulary()[0].tolist() if _is_easy(tried.learner._evaluator, token))
    heard = 0
    while "changed" not in tried.kinds():
        tried.learner.observe(undrafted(1_000 + heard, token=easy))
        heard += 1
        assert heard < 40
    assert len(tried.learner._validation.current) < 2
    assert tried.learner._validation.texts


def _is_easy(judge: OfflineEvaluator, token: int) -> bool:
    """Whether the tiny drafter proposes it all the time."""
    example = example_of(feedback(0, token=token))
    assert example is not None
    return judge.anchor_once(ValidationText(0, example)) > 2.0
