"""Answers of other words are noticed in a few queries; the same words, however well they come to be known, are not."""

import random
from collections.abc import Sequence

import pytest

from adaptation.traffic import TokenChange
from tests.adaptation.samples import query

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
