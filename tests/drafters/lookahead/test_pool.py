from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.lookahead.pool import CONTEXT, NOTHING, ORDERS, WAYS, NgramPool, contexts_of

ROW = torch.tensor([1])


def pool() -> NgramPool:
    return NgramPool(2, "cpu")


def add(grams: NgramPool, text: list[int], row: int = 1, weight: float = 1.0) -> None:
    tokens = torch.tensor(text)
    times = torch.arange(len(text) - 1)[None]
    weights = torch.full(times.shape, weight)
    grams.add(torch.tensor([row]), contexts_of(tokens)[None, :-1], tokens[None, 1:], weights, times)


def found(grams: NgramPool, text: list[int], row: int = 1) -> list[dict[int, float]]:
    """What followed the last tokens of a text, by order, and what it weighs."""
    tokens, counts, _ = grams.find(torch.tensor([row]), contexts_of(torch.tensor(text))[None, -1:])
    lines = zip(tokens[0, 0].tolist(), counts[0, 0].tolist(), strict=True)
    return [{t: c for t, c in zip(*line, strict=True) if t != NOTHING} for line in lines]


def test_contexts_begin_with_their_newest_token() -> None:
    assert contexts_of(torch.tensor([7, 8, 9])).tolist() == [[7, -1, -1, -1], [8, 7, -1, -1], [9, 8, 7, -1]]


def test_what_followed_is_found_by_every_order_that_agrees() -> None:
    grams = pool()
    add(grams, [1, 2, 3, 4, 50])
    assert found(grams, [1, 2, 3, 4]) == [{50: 1.0}] * len(ORDERS)
    assert found(grams, [9, 9, 3, 4]) == [{}, {50: 1.0}, {50: 1.0}]
    assert found(grams, [3, 9, 9, 4]) == [{}, {}, {50: 1.0}]
    assert found(grams, [4, 9]) == [{}] * len(ORDERS)


def test_sightings_add_up_within_a_call_and_over_calls() -> None:
    grams = pool()
    add(grams, [4, 5, 4, 5, 4, 6])
    assert found(grams, [4])[-1] == {5: 2.0, 6: 1.0}
    add(grams, [4, 5], weight=0.25)
    assert found(grams, [4])[-1] == {5: 2.25, 6: 1.0}


def test_the_last_sighting_is_the_latest() -> None:
    grams = pool()
    add(grams, [4, 5, 4, 6, 4, 5])
    tokens, _, times = grams.find(ROW, contexts_of(torch.tensor([4]))[None])
    known = tokens[0, 0, -1] != NOTHING
    assert dict(zip(tokens[0, 0, -1][known].tolist(), times[0, 0, -1][known].tolist(), strict=True)) == {5: 4, 6: 2}
    assert (times[0, 0, -1][~known] == NOTHING).all()


def test_no_successor_is_kept_of_nothing() -> None:
    grams = pool()
    contexts = torch.full((1, 3, CONTEXT), 7)
    grams.add(ROW, contexts, torch.full((1, 3), NOTHING), torch.ones(1, 3), torch.ones(1, 3).long())
    assert found(grams, [7, 7, 7, 7]) == [{}] * len(ORDERS)


def test_rows_do_not_see_each_other_and_are_forgotten() -> None:
    grams = pool()
    add(grams, [1, 2, 3], row=0)
    add(grams, [1, 2, 4], row=1)
    assert (found(grams, [2], row=0)[-1], found(grams, [2], row=1)[-1]) == ({3: 1.0}, {4: 1.0})
    grams.forget([1])
    assert (found(grams, [2], row=0)[-1], found(grams, [2], row=1)[-1]) == ({3: 1.0}, {})


@given(st.lists(st.integers(0, 60), min_size=2, max_size=400))
def test_it_is_bounded_per_context_and_finds_nothing_that_was_not_there(text: list[int]) -> None:
    grams = pool()
    size = grams._entries.shape
    add(grams, text)
    pairs = set(pairwise(text))
    for token in set(text):
        successors = found(grams, [token])[-1]
        assert len(successors) <= WAYS
        assert all((token, successor) in pairs for successor in successors)
    assert grams._entries.shape == size


def test_a_text_longer_than_the_pool_pushes_out_what_was_there() -> None:
    grams = pool()
    add(grams, [1, 2])
    tokens = torch.randperm(100_000)[:60_000] + 10
    add(grams, tokens.tolist())
    kept = (grams._entries != NOTHING).view(3, -1).sum(1)
    assert kept.tolist()[::2] == [0, 0]
    assert 0.9 * grams._entries.numel() / 3 < kept[1] <= grams._entries.numel() / 3
