"""Tree attention against plain attention written row by row, and a row's bits alone against the same row in company."""

import random

import pytest
import torch

from kernels.tree_attention import MAX_DEPTH, MAX_NODES, SPAN, WIDTH
from tests.kernels.attention_parts import (
    Heads,
    Part,
    Vectors,
    attend,
    naive,
    random_parents,
    random_part,
    tree_around,
)

__all__ = ["random_parents"]

torch.set_num_threads(1)

TOLERANCE = 1e-5

SHAPES = [Heads(1, 1, 8), Heads(2, 2, 16), Heads(1, 3, 16), Heads(3, 3, 64), Heads(1, 8, 16), Heads(2, 8, 8)]


@pytest.mark.parametrize("seed", range(18))
def test_equals_plain_attention(seed: int) -> None:
    rng = random.Random(seed)
    heads = SHAPES[seed % len(SHAPES)]
    parts = [random_part(rng, heads) for _ in range(rng.randrange(1, 6))]
    window, softcap = rng.choice([None, 1, 20, 150, 500]), rng.choice([None, None, 5.0])
    outputs = attend(parts, heads, window=window, softcap=softcap, seed=seed)
    for part, output in zip(parts, outputs, strict=True):
        torch.testing.assert_close(output, naive(part, heads, window, softcap), atol=TOLERANCE, rtol=TOLERANCE)


def test_the_deepest_and_fullest_tree() -> None:
    heads = Heads(2, 3, 16)
    chain = [-1, *range(MAX_DEPTH - 1)]
    parents = [*chain, *(MAX_DEPTH - 2 for _ in range(MAX_NODES - MAX_DEPTH))]
    for end in (1, SPAN, SPAN + 1, SPAN + MAX_DEPTH, WIDTH, WIDTH + MAX_DEPTH, 3 * SPAN + MAX_DEPTH):
        text, nodes = Vectors.draw(end, heads, end), Vectors.draw(MAX_NODES, heads, end + 1)
        part = Part(text, end - 1, end, nodes, parents)
        assert max(part.depths) == MAX_DEPTH
        (output,) = attend([part], heads)
        torch.testing.assert_close(output, naive(part, heads, None, None), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("heads", [Heads(2, 2, 16), Heads(3, 3, 64), Heads(1, 1, 8), Heads(1, 8, 16)], ids=str)
def test_a_chunk_of_any_size_gives_the_bits_of_single_rows(heads: Heads, window: int | None) -> None:
    text = Vectors.draw(420, heads, seed=1)
    alone = torch.cat([attend([Part(text, p, p + 1)], heads, window=window, seed=p)[0] for p in range(420)])
    for chunk in (7, 48, 129, 420):
        for start in range(0, 420, chunk):
            (output,) = attend([Part(text, start, min(start + chunk, 420))], heads, window=window, seed=chunk)
            assert torch.equal(output, alone[start : start + chunk])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("heads", [Heads(2, 2, 16), Heads(3, 3, 64), Heads(1, 1, 8), Heads(1, 8, 16)], ids=str)
@pytest.mark.parametrize("end", [1, 30, 63, 64, 65, 128, 144, 333, 500])
def test_a_path_in_a_tree_in_company_gives_the_bits_of_single_rows(end: int, heads: Heads, window: int | None) -> None:
    rng = random.Random(end)
    text = Vectors.draw(end + MAX_DEPTH, heads, seed=end)
    alone = torch.cat(
        [attend([Part(text, p, p + 1)], heads, window=window)[0] for p in range(end - 1, end + MAX_DEPTH)]
    )
    part, places = tree_around(text, end, heads, rng)
    company = [random_part(rng, heads) for _ in range(rng.randrange(4))]
    where = rng.randrange(len(company) + 1)
    outputs = attend([*company[:where], part, *company[where:]], heads, window=window, seed=end)
    assert torch.equal(outputs[where][[0, *(1 + place for place in places)]], alone)


def test_the_same_bits_in_any_slots_and_any_line() -> None:
    heads, rng = Heads(2, 2, 16), random.Random(3)
    parts = [random_part(rng, heads) for _ in range(4)]
    once, again = attend(parts, heads, seed=1), attend(parts[::-1], heads, seed=2)[::-1]
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_more_padding_changes_no_bit(heads: Heads) -> None:
    parts = [random_part(random.Random(seed), heads) for seed in range(3)]
    once, again = attend(parts, heads), attend(parts, heads, multiples=3)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_another_branch_of_the_tree_is_not_seen() -> None:
    """Changing one node changes exactly the rows at and below it."""
    heads = Heads(1, 2, 16)
    text, nodes = Vectors.draw(100, heads, 1), Vectors.draw(6, heads, 2)
    parents = [-1, -1, 0, 1, 2, 3]
    (before,) = attend([Part(text, 99, 100, nodes, parents)], heads)
    nodes.values[1] += 1
    (after,) = attend([Part(text, 99, 100, nodes, parents)], heads)
    changed = (before != after).flatten(1).any(1).tolist()
    assert changed == [False, False, True, False, True, False, True]
