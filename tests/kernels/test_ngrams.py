"""N-grams behind texts and nodes: found again, bounded; the compiled twins do as the reference says."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import ops
from kernels.ngrams import (
    BUCKETS,
    CONTEXT,
    NOTHING,
    WAYS,
    Ahead,
    NgramEvidence,
    Ngrams,
    Spoken,
)
from kernels.ops import REFERENCE, Ops
from kernels.trees import ROOT, DraftTree, likeliest_nodes
from tests.drafters.trees import assert_valid_tree, draft_trees, path_to

WAYS_TO_COMPUTE = {"reference": REFERENCE, "compiled": ops.on(torch.device("cpu"))}
ROWS = 3  # the last is nobody's
LEVELS, BEAM = 4, 5


def evidence() -> NgramEvidence:
    """Any rates, different in almost all buckets."""
    generator = torch.Generator().manual_seed(1)
    edges = torch.tensor([0.3, 0.6]), torch.tensor([0.5, 1.5])
    rates, of_depth = torch.rand(2160, generator=generator) * 0.97, torch.tensor([0, 1, 2, 2])
    return NgramEvidence(rates, *edges, of_depth, sampled=1080, kind=108, share=36, count=12, latest=6, agrees=3)


def chain(text: list[int]) -> Spoken:
    """A text as what follows its first token."""
    tokens = torch.tensor([text])
    tails = torch.tensor([[*[NOTHING] * (CONTEXT - 1), text[0]]])
    said = torch.tensor([[*text[1:], NOTHING]])
    return Spoken(tails, tokens[:, 1:], torch.arange(ROOT, len(text) - 2)[None], said)


def add(with_: Ops, known: Ngrams, text: list[int], row: int = 0, weight: float = 1.0, time: int = 0) -> None:
    weights = torch.full((1, len(text)), weight)
    with_.add_ngrams(known, torch.tensor([row]), chain(text), weights, torch.tensor([time]))


def tail_of(text: list[int]) -> list[int]:
    return [*[NOTHING] * (CONTEXT - len(text)), *text][-CONTEXT:]


def grown(
    with_: Ops, known: Ngrams, text: list[int], row: int = 0, guesses: tuple[int, ...] = (), temperature: float = 0.0
) -> DraftTree:
    guessed = torch.tensor([[*guesses, *[NOTHING] * (LEVELS - len(guesses))]])
    ahead = Ahead(torch.tensor([tail_of(text)]), guessed, guessed > 0, torch.tensor([temperature]))
    raw, _ = with_.grow_ngrams(known, torch.tensor([row]), ahead, evidence(), BEAM, 1e-6)
    return likeliest_nodes(raw, LEVELS * BEAM)[0]


def words(tree: DraftTree) -> list[list[int]]:
    return [[int(tree.tokens[0, at]) for at in path_to(tree, 0, node)] for node in range(int(tree.num_nodes[0]))]


@pytest.fixture(params=list(WAYS_TO_COMPUTE))
def computed(request: pytest.FixtureRequest) -> Ops:
    return WAYS_TO_COMPUTE[request.param]


def test_what_followed_a_context_is_found_by_any_order(computed: Ops) -> None:
    known = Ngrams.empty(ROWS, "cpu")
    add(computed, known, [1, 2, 3, 4, 50, 60])
    assert [50, 60] in words(grown(computed, known, [1, 2, 3, 4]))
    assert [50, 60] in words(grown(computed, known, [3, 4]))
    assert [50, 60] in words(grown(computed, known, [9, 9, 9, 4]))
    assert words(grown(computed, known, [4, 9])) == []


def test_sightings_weigh_together(computed: Ops) -> None:
    known = Ngrams.empty(ROWS, "cpu")
    add(computed, known, [4, 5])
    add(computed, known, [4, 5], weight=0.25)
    add(computed, known, [4, 6], time=7)
    found = known.entries != NOTHING
    assert sorted(known.counts[found].tolist()) == [1.0] * 3 + [1.25] * 3
    assert sorted(known.times[found].tolist()) == [0] * 3 + [7] * 3


def test_what_is_said_behind_nodes_is_found_and_what_is_not_said_is_not(computed: Ops) -> None:
    known = Ngrams.empty(ROWS, "cpu")
    # Below the text 1 2 two branches, 10 and 20 21; nothing was said behind 21.
    tails, tokens = torch.tensor([tail_of([1, 2])]), torch.tensor([[10, 20, 21]])
    spoken = Spoken(tails, tokens, torch.tensor([[ROOT, ROOT, 1]]), torch.tensor([[7, 8, 9, NOTHING]]))
    computed.add_ngrams(known, torch.tensor([0]), spoken, torch.ones(1, 4), torch.tensor([1]))
    assert words(grown(computed, known, [1, 2])) == [[7]]
    assert words(grown(computed, known, [1, 2, 10])) == [[8]]
    assert words(grown(computed, known, [1, 2, 20])) == [[9]]
    assert words(grown(computed, known, [1, 2, 20, 21])) == []


def test_rows_do_not_see_each_other_and_are_forgotten(computed: Ops) -> None:
    known = Ngrams.empty(ROWS, "cpu")
    add(computed, known, [1, 2, 3], row=0)
    add(computed, known, [1, 2, 4], row=1)
    assert (words(grown(computed, known, [2], row=0)), words(grown(computed, known, [2], row=1))) == ([[3]], [[4]])
    known.forget(1)
    assert (words(grown(computed, known, [2], row=0)), words(grown(computed, known, [2], row=1))) == ([[3]], [])


def test_guesses_hang_below_the_likeliest_path_and_are_continued(computed: Ops) -> None:
    known = Ngrams.empty(ROWS, "cpu")
    add(computed, known, [30, 31])
    assert words(grown(computed, known, [9], guesses=(20, 30))) == [[20], [20, 30], [20, 30, 31]]
    add(computed, known, [9, 10, 11])
    assert [10, 11, 30, 31] in words(grown(computed, known, [9], guesses=(10, 11, 30)))


@given(text=st.lists(st.integers(0, 60), min_size=2, max_size=300))
@pytest.mark.parametrize("name", list(WAYS_TO_COMPUTE))
def test_a_context_has_few_successors_and_none_that_never_followed(name: str, text: list[int]) -> None:
    computed, known = WAYS_TO_COMPUTE[name], Ngrams.empty(ROWS, "cpu")
    add(computed, known, text)
    pairs = set(pairwise(text))
    for token in set(text[:20]):
        tree = grown(computed, known, [token])
        assert_valid_tree(tree)
        first = [path[0] for path in words(tree) if len(path) == 1]
        assert len(first) <= WAYS
        assert all((token, successor) in pairs for successor in first)


def test_a_row_is_bounded_however_long_its_text(computed: Ops) -> None:
    known = Ngrams.empty(ROWS, "cpu")
    add(computed, known, (torch.randperm(60_000) + 10).tolist(), row=1)
    kept = (known.entries != NOTHING).view(ROWS, -1).sum(1).tolist()
    assert (kept[0], kept[2]) == (0, 0)
    assert 0.9 * BUCKETS * WAYS < kept[1] <= BUCKETS * WAYS


@given(st.data(), st.sampled_from([0.0, 0.7]))
def test_the_compiled_twins_are_the_reference(data: st.DataObject, temperature: float) -> None:
    """Where no two sightings come to one place in one call, of which either may have it."""
    tokens = st.integers(0, 9)
    texts = [data.draw(st.lists(tokens, min_size=CONTEXT, max_size=30)) for _ in range(2)]
    tree = data.draw(draft_trees(max_batch=1, max_nodes=8))
    said = data.draw(st.lists(st.integers(-1, 9), min_size=tree.width + 1, max_size=tree.width + 1))
    guesses = data.draw(st.lists(st.integers(-1, 9), min_size=2 * LEVELS, max_size=2 * LEVELS))
    results: list[tuple[Tensor, ...]] = []
    for computed in WAYS_TO_COMPUTE.values():
        known = Ngrams.empty(ROWS, "cpu")
        for row, text in enumerate(texts):
            for at in range(1, len(text)):
                add(computed, known, text[max(0, at - 1) : at + 1], row, weight=0.25, time=at)
        tails = torch.tensor([tail_of(texts[0])])
        for node in range(tree.width + 1):  # one by one
            alone = torch.where(torch.arange(tree.width + 1) == node, torch.tensor(said), NOTHING)[None]
            spoken = Spoken(tails, tree.tokens, tree.parents, alone)
            computed.add_ngrams(known, torch.tensor([0]), spoken, torch.ones(1, tree.width + 1), torch.tensor([50]))
        ahead = Ahead(
            torch.tensor([text[-CONTEXT:] for text in texts]),
            torch.tensor(guesses).view(2, LEVELS),
            torch.tensor(guesses).view(2, LEVELS) % 2 == 0,
            torch.tensor([temperature, 0.0]),
        )
        raw, buckets = computed.grow_ngrams(known, torch.arange(2), ahead, evidence(), BEAM, 0.001)
        best, chosen = likeliest_nodes(raw, LEVELS * BEAM)
        places = [table.view(ROWS, -1)[:2] for table in known[:3]]
        results.append((*best, buckets.gather(1, chosen) * best.valid, *places))
    for reference, compiled in zip(*results, strict=True):
        assert torch.equal(reference, compiled)
