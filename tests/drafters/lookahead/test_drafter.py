from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from drafters.lookahead.calibration import LEVELS
from drafters.protocol import DraftContext
from drafters.tree import ROOT, DraftTree
from tests.drafters.lookahead.parts import drafter, grow, step, verify, words
from tests.drafters.trees import assert_valid_tree
from tests.kernels.tensor_program import kernels, record

PERIOD = [11, 12, 13, 14, 15, 16, 17]


def in_circles(text: Sequence[int]) -> int:
    """Goes round, whatever was said."""
    return PERIOD[(PERIOD.index(text[-1]) + 1) % len(PERIOD)] if text[-1] in PERIOD else PERIOD[0]


def by_position(text: Sequence[int]) -> int:
    """The token depends on the position alone, and never comes again: a pool cannot know it."""
    return 1000 + len(text)


def tree_of(*paths: Sequence[int]) -> DraftTree:
    """Chains below the root, the likeliest first."""
    tokens = torch.tensor([[token for path in paths for token in path]])
    parents = [place - 1 if place else -1 for path in paths for place in range(len(path))]
    starts = torch.tensor([sum(map(len, paths[:number])) for number, path in enumerate(paths) for _ in path])
    below = torch.tensor(parents)
    tree = DraftTree.of(tokens, torch.where(below < 0, -1, below + starts)[None])
    return tree._replace(survival=0.9 ** torch.arange(1.0, tokens.shape[1] + 1)[None])


def test_text_that_says_nothing_twice_gets_no_tree() -> None:
    drafts = drafter()
    drafts.start([DraftContext(1, list(range(100, 120)))])
    assert grow(drafts, [1]).num_nodes.tolist() == [0]
    drafts.start([DraftContext(1, [5])])
    assert grow(drafts, [1]).num_nodes.tolist() == [0]


def test_a_prompt_that_repeats_itself_is_continued_as_deep_as_trees_go() -> None:
    drafts = drafter()
    drafts.start([DraftContext(0, PERIOD * 3)])
    tree = grow(drafts, [0])
    assert_valid_tree(tree)
    assert (PERIOD * 3)[:LEVELS] in words(tree)


def test_a_text_that_repeats_itself_is_accepted() -> None:
    drafts, text = drafter(), {2: [9, *PERIOD]}
    drafts.start([DraftContext(2, list(text[2]))])
    accepted = [step(drafts, text, in_circles)[0] for _ in range(12)]
    assert accepted[-1] == LEVELS
    assert text[2] == [9, *(PERIOD * 99)[: len(text[2]) - 1]]


def test_what_was_said_behind_a_rejected_node_is_found_again() -> None:
    """The text never says 70 71: the target says it behind a wrong guess, and again where the guess is right."""
    drafts, text = drafter(), {0: [1, 2, 3]}
    drafts.start([DraftContext(0, list(text[0]))])

    def target(said: Sequence[int]) -> int:
        return {70: 71, 71: 72}.get(said[-1], 5)

    assert verify(drafts, text, target, tree_of([70, 71, 99])) == [0]
    assert text[0][3:] == [5]
    verify(drafts, text, lambda said: 70, DraftTree.empty(1))  # plain: the text comes to 70 by itself
    assert [71, 72] in words(grow(drafts, [0]))


def test_a_choice_behind_a_rejected_node_is_a_guess_for_its_position() -> None:
    drafts, text = drafter(), {0: [1, 2, 3]}
    drafts.start([DraftContext(0, list(text[0]))])
    assert verify(drafts, text, by_position, tree_of([50, 51, 52])) == [0]
    # 1003 came; behind 50, 51 and 52 the target said what comes at the positions after it, in any case.
    assert words(grow(drafts, [0])) == [[1004], [1004, 1005]]
    verify(drafts, text, by_position, DraftTree.empty(1))  # a plain step moves on
    assert words(grow(drafts, [0])) == [[1005], [1005, 1006]]


def test_what_is_said_behind_padding_is_not_learnt() -> None:
    """Trees in fixed widths: rows of padding run as if 0 had been said, and something is chosen behind them."""
    drafts, text = drafter(), {0: [1, 2, 3]}
    drafts.start([DraftContext(0, list(text[0]))])
    tree = tree_of([50])
    tokens, parents, depths, survival = (
        pad(values, (0, 2), value=padding) for values, padding in zip(tree[:4], (0, ROOT, 0, 0), strict=True)
    )
    padded = DraftTree(tokens, parents, depths, survival, tree.num_nodes)
    assert verify(drafts, text, lambda said: 0, padded, behind_padding=42) == [0]
    assert text[0] == [1, 2, 3, 0]
    assert [42] not in words(grow(drafts, [0]))


def test_guesses_are_learnt_to_be_right() -> None:
    drafts, text = drafter(), {0: [1, 2, 3]}
    drafts.start([DraftContext(0, list(text[0]))])
    chances = []
    for _ in range(40):
        verify(drafts, text, by_position, tree_of([50, 51, 52]))
        tree = grow(drafts, [0])
        chances.append(float(tree.survival[0, 0]))
    assert chances[0] < 0.2
    assert chances[-1] > 0.6
    after = 1000 + len(text[0])
    assert words(tree) == [list(range(after, after + depth)) for depth in (1, 2, 3)]


def test_what_never_comes_true_is_given_up() -> None:
    """Behind 4 a token follows that never came before."""
    drafts, text, chances = drafter(), {0: [4, 5, 4, 6, 4]}, []
    drafts.start([DraftContext(0, list(text[0]))])
    for number in range(100, 160):
        tree = grow(drafts, [0])
        chances.append(float(tree.survival.max()))
        for token in (number, 4):
            verify(drafts, text, lambda said, token=token: token, DraftTree.empty(1))  # type: ignore[misc]
    assert chances[-1] < 0.4 * chances[0]


def test_sequences_keep_to_themselves_and_are_forgotten() -> None:
    drafts, texts = drafter(), {0: [9, *PERIOD], 3: [8, *PERIOD[::-1]]}
    drafts.start([DraftContext(row, list(text)) for row, text in texts.items()])

    def target(said: Sequence[int]) -> int:
        turn = 1 if said[0] == 9 else -1
        return PERIOD[(PERIOD.index(said[-1]) + turn) % len(PERIOD)] if said[-1] in PERIOD else said[-1]

    for _ in range(12):
        accepted = step(drafts, texts, target)
    assert accepted == [LEVELS, LEVELS]
    assert drafts.finish([0]) == [0]
    drafts.start([DraftContext(0, [PERIOD[0]])])
    assert grow(drafts, [0, 3]).num_nodes.tolist()[0] == 0
    assert grow(drafts, [3]).num_nodes.tolist()[0] > 0


@settings(max_examples=20)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=60), st.sampled_from([0.0, 1.0]), st.integers(1, 12))
def test_trees_keep_every_promise(text: list[int], temperature: float, most: int) -> None:
    drafts = drafter(max_nodes=most)
    drafts.start([DraftContext(1, text)])
    texts = {1: list(text)}
    for _ in range(3):
        tree = grow(drafts, [1], temperature)
        assert tree.width <= most
        assert_valid_tree(tree)
        verify(drafts, texts, lambda said: sum(said) % 6 + 1, tree)


@pytest.mark.parametrize("budget", [0, 8])
def test_captured_it_drafts_the_same(budget: int) -> None:
    """With batches of several sizes, which pad to the shapes that were captured."""
    with kernels():
        captured = drafter(record, max_sequences=3, max_nodes=16)
    ways = (drafter(max_sequences=3, max_nodes=16), captured)
    texts = [{0: [9, *PERIOD], 1: [4, 5, 4, 6, 4], 2: [*PERIOD, 8, 9]} for _ in ways]
    num_nodes = 0
    for batch in ((0, 1, 2), (0, 1, 2), (1,), (1,), (0, 2), (0, 2), (0, 1, 2)):
        trees = []
        for drafts, all_texts in zip(ways, texts, strict=True):
            if batch == (0, 1, 2):
                drafts.start([DraftContext(row, list(text)) for row, text in all_texts.items()])
            tree = grow(drafts, batch)
            trees.append([words(tree, line) for line in range(len(batch))])
            some = {row: all_texts[row] for row in batch}
            step(drafts, some, in_circles, budget=budget)
        assert trees[0] == trees[1]
        num_nodes += sum(map(len, trees[0]))
    assert num_nodes > 20
    assert texts[0] == texts[1]
