"""Answers of other words are noticed in a few queries; the same words, however well they come to be known, are not."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

from adaptation.evaluator import OfflineEvaluator
from adaptation.samples import ValidationText, example_of
from adaptation.traffic import AnchorScoreChange, ChangeDetector, TokenChange
from tests.adaptation.samples import bench, feedback, query, undrafted, vocabulary

torch.set_num_threads(1)


def change() -> ChangeDetector:
    return ChangeDetector()


def scores(mean: float, *, seed: int = 0, spread: float = 0.1) -> Iterator[float]:
    rng = random.Random(seed)
    while True:
        yield rng.gauss(mean, spread)


def first_change(traffic: ChangeDetector, queries: Iterator[float], most: int) -> int | None:
    return next((number for number, score in zip(range(most), queries, strict=False) if traffic.observe(score)), None)


@pytest.mark.parametrize("now", [0.2, 0.6])
@pytest.mark.parametrize("seed", range(3, 13))
def test_other_traffic_is_soon_noticed(now: float, seed: int) -> None:
    traffic = change()
    assert first_change(traffic, scores(0.4, seed=seed), 150) is None
    found = first_change(traffic, scores(now, seed=seed + 100), 40)
    assert found is not None
    assert found < 20


def test_the_same_traffic_is_seldom_called_another() -> None:
    traffic, queries = change(), scores(0.4)
    assert sum(traffic.observe(next(queries)) for _ in range(30_000)) < 10


def test_one_odd_query_changes_nothing() -> None:
    traffic = change()
    assert first_change(traffic, scores(0.4), 100) is None
    assert not traffic.observe(50.0)
    assert not traffic.observe(-50.0)


def test_what_is_usual_is_learnt_anew_after_a_change() -> None:
    traffic = change()
    first_change(traffic, scores(0.4), 150)
    assert first_change(traffic, scores(0.8), 40) is not None
    assert first_change(traffic, scores(0.8, seed=1), 150) is None
    assert first_change(traffic, scores(0.4, seed=2), 40) is not None


def test_a_slow_drift_is_no_change() -> None:
    traffic, noise = change(), scores(0.0)
    assert not any(traffic.observe(0.3 + number * 0.0002 + next(noise)) for number in range(400))


def test_what_is_no_number_says_nothing() -> None:
    traffic, told = change(), change()
    for score in (0.3, 0.4, 0.5) * 20:
        assert not traffic.observe(math.nan)
        assert traffic.observe(score) == told.observe(score)


def test_nothing_is_suspected_while_nobody_knows_what_is_usual() -> None:
    early, late = change(), change()
    early.suspect()
    for score in (0.4, 0.5) * 12:
        assert not early.observe(score)
        assert not late.observe(score)
    late.suspect()
    assert [traffic.observe(0.9) or traffic.observe(0.9) for traffic in (early, late)] == [False, True]


def test_equal_scores_are_no_change() -> None:
    traffic = change()
    assert not any(traffic.observe(0.5) for _ in range(200))


def test_queries_of_which_little_is_known_count_together() -> None:
    few, told = change(), change()
    rng = random.Random(0)
    for _ in range(100):
        parts = [[rng.gauss(0.4, 0.1) for _ in range(count)] for count in (1, 6, 0, 9)]
        heard = [few.observe_values(part) for part in parts]
        assert heard[:3] == [False] * 3
        assert heard[3] == told.observe(sum(map(sum, parts)) / 16)


@pytest.mark.parametrize(("now", "found"), [(0.2, False), (0.6, True)])
def test_falling_scores_may_be_nothing_new(now: float, found: bool) -> None:
    traffic = ChangeDetector(memory=32, only_rising=True)
    assert first_change(traffic, scores(0.4), 150) is None
    assert (first_change(traffic, scores(now, seed=1), 40) is not None) is found


VOCAB = 5000


def words() -> TokenChange:
    return TokenChange(VOCAB)


def texts(count: int, *, language: int, seed: int = 0) -> list[list[int]]:
    """Of a language of a thousand words, a few of them frequent; some texts are long and some are short."""
    rng = random.Random(seed)
    known = random.Random(language).sample(range(VOCAB), 1000)
    weights = [1 / (rank + 1) for rank in range(len(known))]
    return [rng.choices(known, weights, k=rng.randrange(10, 200)) for _ in range(count)]


def noticed(heard: TokenChange, said: Sequence[list[int]]) -> list[int]:
    return [number for number, text in enumerate(said) if heard.observe(query(text))]


@pytest.mark.parametrize("queries", [60, 100, 300])
@pytest.mark.parametrize("seed", range(6))
def test_another_language_is_noticed_in_a_few_queries(seed: int, queries: int) -> None:
    heard = words()
    assert noticed(heard, texts(queries, language=1, seed=seed)) == []
    found = noticed(heard, texts(12, language=2, seed=seed))
    assert found
    assert found[0] < 8


@pytest.mark.parametrize("seed", range(6))
def test_one_of_several_languages_alone_is_noticed(seed: int) -> None:
    heard = words()
    mixed = [text for three in zip(*(texts(70, language=n, seed=n) for n in range(3)), strict=True) for text in three]
    assert noticed(heard, mixed) == []
    found = noticed(heard, texts(40, language=1, seed=seed + 10))
    assert found
    assert found[0] < 30


def test_what_is_asked_says_nothing() -> None:
    heard = words()
    rng = random.Random(0)
    for language in (1, 2):
        for answer in texts(60, language=1, seed=language):
            asked = texts(1, language=language, seed=rng.randrange(1000))[0]
            assert not heard.observe(query([*asked, *answer], num_prompt=len(asked)))
    assert not heard.observe(query([1, 2, 3], num_prompt=3))


def test_the_same_language_becomes_known_and_is_never_called_another() -> None:
    assert noticed(words(), texts(3000, language=1)) == []


def test_of_a_long_text_only_its_end_is_heard() -> None:
    ends = [text * 60 for text in texts(110, language=1)[:100] + texts(10, language=2)]
    whole, cut = ([[*before, *text[:512]] for text in ends] for before in ([7] * 3000, []))
    assert noticed(words(), whole) == noticed(words(), cut) != []


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
    easy = max(vocabulary()[0].tolist(), key=partial(_ease, tried.learner._evaluator))
    heard = 0
    while "changed" not in tried.kinds():
        tried.learner.observe(undrafted(1_000 + heard, token=easy))
        heard += 1
        assert heard < 40
    assert len(tried.learner._validation.current) < 2
    assert tried.learner._validation.texts


def _ease(judge: OfflineEvaluator, token: int) -> float:
    """How long the tiny drafter's accepted paths are where the text says nothing else."""
    example = example_of(feedback(0, token=token))
    assert example is not None
    return judge.anchor_once(ValidationText(0, example))
