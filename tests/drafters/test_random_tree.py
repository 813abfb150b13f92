import pytest
import torch

from drafters.protocol import DraftContext, DraftingSizes, Noise
from drafters.random_tree import RandomTreeDrafter
from drafters.tree import ROOT
from tests.drafters.trees import assert_valid_tree

NODES, ROWS = 20, torch.tensor([2, 0])
NOISE = Noise(torch.zeros(2), torch.zeros(2), torch.zeros(2))


def drafter(hit_rate: float, vocab_size: int = 50) -> RandomTreeDrafter:
    sizes = DraftingSizes(max_sequences=3, max_length=64, max_nodes=NODES, vocab_size=vocab_size)
    return RandomTreeDrafter(sizes, seed=7, hit_rate=hit_rate)


@pytest.mark.parametrize("vocab_size", [NODES, 50])
def test_draws_are_valid_trees_from_bush_to_chain(vocab_size: int) -> None:
    random = drafter(0.7, vocab_size)
    random.start([DraftContext(2, [1], range(vocab_size)), DraftContext(0, [1])])
    depths = set[int]()
    for _ in range(300):
        tree = random.grow(ROWS, NOISE)
        assert_valid_tree(tree)
        depths |= set(tree.depths.amax(1).tolist())
    assert min(depths) <= 2
    assert max(depths) > 16


def test_a_sure_hit_puts_the_answer_under_every_parent() -> None:
    random, seen = drafter(1.0), 0
    answer = range(10, 50)
    random.start([DraftContext(2, [1, 10, 11, 12], answer, num_generated=3), DraftContext(0, [1], answer)])
    for _ in range(100):
        tree = random.grow(ROWS, NOISE)
        for b, generated in enumerate([3, 0]):
            if int(tree.num_nodes[b]) < NODES:
                continue
            for parent in {ROOT, *tree.parents[b].tolist()}:
                children = tree.parents[b] == parent
                assert 10 + generated + int(tree.depths[b][children][0]) - 1 in tree.tokens[b][children].tolist()
                seen += 1
    assert seen > 50
