"""Answers of other words are noticed in a few queries; the same words, however well they come to be known, are not."""

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from adaptation.monitor import RisingScores, TokenCounts, TrafficMonitor
from adaptation.policy import State

torch.set_num_threads(1)


def change() -> RisingScores:
    return RisingScores()


def scores(mean: float, *, seed: int = 0, spread: float = 0.1) -> Iterator[float]:
    rng = random.Random(seed)
    while True:
        yield rng.gauss(mean, spread)


def first_change(traffic: RisingScores, queries: Iterator[float], most: int) -> int | None:
    return next((number for number, score in zip(range(most), queries, strict=False) if traffic.observe(score)), None)


@pytest.mark.parametrize("seed", range(3, 13))
def test_higher_scores_are_soon_noticed(seed: int) -> None:
    traffic = change()
    assert first_change(traffic, scores(0.4, seed=seed), 150) is None
    found = first_change(traffic, scores(0.6, seed=seed + 100), 40)
    assert found is not None
    assert found < 20


def test_the_same_traffic_is_seldom_called_another() -> None:
    traffic, queries = change(), scores(0.4)
    assert sum(traffic.observe(next(queries)) for _ in range(30_000)) < 10


def test_what_is_usual_is_learnt_anew_after_a_change() -> None:
    traffic = change()
    first_change(traffic, scores(0.4), 150)
    assert first_change(traffic, scores(0.8), 40) is not None
    assert first_change(traffic, scores(0.8, seed=1), 150) is None
    assert first_change(traffic, scores(1.2, seed=2), 40) is not None


VOCAB = 5000


def words() -> TrafficMonitor:
    return TrafficMonitor(VOCAB)


def texts(count: int, *, language: int, seed: int = 0) -> list[list[int]]:
    """Of a language of a thousand words, a few of them frequent; some texts are long and some are short."""
    rng = random.Random(seed)
    known = random.Random(language).sample(range(VOCAB), 1000)
    weights = [1 / (rank + 1) for rank in range(len(known))]
    return [rng.choices(known, weights, k=rng.randrange(10, 200)) for _ in range(count)]


def noticed(heard: TrafficMonitor, said: Sequence[list[int]]) -> list[int]:
    return [number for number, text in enumerate(said) if heard.observe(text)]


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


def test_an_empty_answer_says_nothing() -> None:
    assert not words().observe([])


def test_the_same_language_becomes_known_and_is_never_called_another() -> None:
    assert noticed(words(), texts(3000, language=1)) == []


def test_of_a_long_text_only_its_end_is_heard() -> None:
    ends = [text * 60 for text in texts(110, language=1)[:100] + texts(10, language=2)]
    whole, cut = ([[*before, *text[:512]] for text in ends] for before in ([7] * 3000, []))
    assert noticed(words(), whole) == noticed(words(), cut) != []


def test_the_most_frequent_tokens_are_those_of_most_answers_and_old_ones_count_less() -> None:
    counts = TokenCounts(20)
    counts.observe([11] * 500)  # no single answer decides
    for _ in range(2):
        counts.observe([3] * 4)
    assert counts.of(torch.tensor([11, 3])).tolist() == pytest.approx([4.0, 8.0], rel=0.01)
    assert counts.most_frequent(3).tolist() == [0, 3, 11]
    for _ in range(3):
        counts.observe([1] * 65_536)
    assert counts.of(torch.tensor([11])).item() == pytest.approx(0.5, rel=0.02)


def test_counts_outlive_the_process() -> None:
    counts, later = TokenCounts(20), TokenCounts(20)
    counts.observe([11, 11, 8, 2])
    later.restore(counts.state())
    assert later.state() == counts.state() == {"tokens": [2, 8, 11], "counts": [1.0, 1.0, 2.0]}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"tokens": [1], "counts": 3.0},
        {"tokens": [1], "counts": [1.0, 2.0]},
        {"tokens": [20], "counts": [1.0]},
        {"tokens": [-1], "counts": [1.0]},
        {"tokens": [1], "counts": [float("nan")]},
        {"tokens": ["a"], "counts": [1.0]},
    ],
)
def test_what_are_no_counts_is_refused_and_changes_nothing(state: State) -> None:
    counts = TokenCounts(20)
    counts.observe([11, 11])
    before = counts.state()
    with pytest.raises(ValueError, match=r"tokens|_StoredCounts"):
        counts.restore(state)
    assert counts.state() == before
