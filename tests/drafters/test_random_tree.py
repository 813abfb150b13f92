import torch

from drafters.protocol import Committed, DraftContext, DraftingSizes, Noise
from drafters.random_tree import RandomTreeDrafter
from drafters.tree import ROOT, DraftTree, VerifyResult
from tests.drafters.trees import assert_valid_tree

NODES = 20
ROWS = torch.tensor([2, 0])
NOISE = Noise(torch.zeros(2), torch.zeros(2), torch.zeros(2))


def drafter(hit_rate: float, seed: int = 7, vocab_size: int = 50) -> RandomTreeDrafter:
    return RandomTreeDrafter(
        DraftingSizes(max_sequences=3, max_length=64, max_nodes=NODES, vocab_size=vocab_size),
        seed=seed,
        hit_rate=hit_rate,
    )


def emit(counts: list[int]) -> Committed:
    empty = DraftTree.empty(2)
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    result = VerifyResult(nothing, torch.zeros(2), torch.zeros(2), torch.zeros(2, 1))
    return Committed(
        ROWS, torch.full((2, 4), 1), torch.tensor(counts), empty, result, None, ROWS, torch.zeros(2, 4).long()
    )


def test_a_thousand_draws_are_valid_trees() -> None:
    random = drafter(0.7)
    random.start([DraftContext(2, [1], range(40)), DraftContext(0, [1])])
    for _ in range(500):
        assert_valid_tree(random.grow(ROWS, NOISE))


def test_siblings_differ_in_the_smallest_vocabulary_that_allows_it() -> None:
    random = drafter(0.7, vocab_size=NODES)
    random.start([DraftContext(2, [1], [3] * 60), DraftContext(0, [1], [5] * 60)])
    for _ in range(300):
        assert_valid_tree(random.grow(ROWS, NOISE))


def test_a_sure_hit_puts_the_answer_under_every_parent() -> None:
    random = drafter(1.0)
    random.start([DraftContext(2, [1], range(10, 50)), DraftContext(0, [1], range(10, 50), num_generated=0)])
    random.commit(emit([3, 0]))
    seen = 0
    for _ in range(100):
        tree = random.grow(ROWS, NOISE)
        for b, generated in enumerate([3, 0]):
            if int(tree.num_nodes[b]) < NODES:
                continue
            for parent in {ROOT, *tree.parents[b].tolist()}:
                children = tree.parents[b] == parent
                expected = 10 + generated + int(tree.depths[b][children][0]) - 1
                assert expected in tree.tokens[b][children].tolist()
                seen += 1
    assert seen > 50


def test_a_rejoined_sequence_goes_on_where_it_was() -> None:
    random = drafter(1.0)
    random.start([DraftContext(2, [1, 10, 11], range(10, 50), num_generated=2), DraftContext(0, [1])])
    trees = [random.grow(ROWS, NOISE) for _ in range(50)]
    roots = [tree.tokens[0][tree.valid[0] & (tree.depths[0] == 1)].tolist() for tree in trees]
    assert sum(12 in tokens for tokens in roots) > 25


def test_the_same_seed_draws_the_same_trees() -> None:
    first, second, other = drafter(0.5), drafter(0.5), drafter(0.5, seed=8)
    trees = [random.grow(ROWS, NOISE) for random in (first, second, other)]
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert torch.equal(trees[0].parents, trees[1].parents)
    assert not torch.equal(trees[0].tokens, trees[2].tokens)


def test_shapes_vary_from_bush_to_chain() -> None:
    depths = torch.cat([drafter(0.5, seed=s).grow(ROWS, NOISE).depths.amax(1) for s in range(100)])
    assert depths.min() <= 2
    assert depths.max() > 16
