"""Forwards on made-up text: they are those of the engine, and leave no slot behind but those of their lines."""

import torch

from drafters.tree import DraftTree
from service.engine.rows import ExtendRows
from service.engine.trial import Trial
from tests.service.engine.harness import tiny_target
from tests.service.engine.test_target import assert_close, stock_logits, tree_of
from tests.tiny_models import VOCAB_SIZE, loaded_tiny

torch.set_num_threads(1)


def trial_of(lines: int = 2) -> Trial:
    return Trial(tiny_target(loaded_tiny("llama"), num_slots=300), lines=lines, max_length=100)


def test_a_text_read_and_continued_is_the_stock_models_text() -> None:
    trial = trial_of()
    tokens = trial.random_tokens(30)
    trial.read(1, tokens[:28], chunk=9)
    found = torch.stack([trial.decode(1, tokens[at], at) for at in (28, 29)])
    assert_close(found, stock_logits("llama", tokens)[28:])


def test_trees_of_different_sizes_stand_in_their_own_lines() -> None:
    trial = trial_of()
    first, second = trial.random_tokens(10), trial.random_tokens(21)
    trial.read(0, first[:-1], chunk=100)
    trial.read(1, second[:-1], chunk=4)
    tree = two_trees([7, 8], [9, 0])
    roots = [ExtendRows(0, 9, first[-1:], completes=True), ExtendRows(1, 20, second[-1:], completes=True)]
    logits = trial.verify(roots, tree)
    assert logits.shape == (2, 3, VOCAB_SIZE)
    assert_close(logits[0], stock_logits("llama", [*first, 7, 8])[-3:])
    assert_close(logits[1, :2], stock_logits("llama", [*second, 9])[-2:])
    assert not logits[1, 2].any()


def two_trees(first: list[int], second: list[int]) -> DraftTree:
    """A extend of two nodes, and one node with padding."""
    long, short = tree_of(first, [-1, 0]), tree_of(second, [-1, -1])
    tree = DraftTree(*(torch.cat([getattr(long, name), getattr(short, name)]) for name in DraftTree.__slots__))
    return DraftTree(tree.tokens, tree.parents, tree.depths, tree.survival, torch.tensor([2, 1]))


def test_verifying_again_and_again_does_not_use_slots_up() -> None:
    trial = trial_of()
    trial.read(0, trial.random_tokens(40), chunk=40)
    root = ExtendRows(0, 40, [3], completes=True)
    first = trial.verify([root], tree_of([5, 6], [-1, -1]))
    for _ in range(300):
        again = trial.verify([root], tree_of([5, 6], [-1, -1]))
    assert torch.equal(again, first)


def test_random_tokens_are_repeatable_and_within_the_vocabulary() -> None:
    tokens = trial_of().random_tokens(200)
    assert tokens == trial_of().random_tokens(200)
    assert all(0 <= token < VOCAB_SIZE for token in tokens)
