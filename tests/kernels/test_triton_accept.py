"""The device's acceptance walk against one written with a stack of ifs, and against the reference."""

import random

import pytest
import torch

from kernels import accept as reference
from kernels.tree_attention import MAX_DEPTH
from kernels.triton.accept import accept
from tests.kernels.random_walks import Tree, batch_of


@pytest.mark.parametrize(("batch", "most"), [(1, 1), (1, 5), (3, 24), (64, 7), (5, 64), (2, 256)])
def test_equals_the_walk(batch: int, most: int, device: str) -> None:
    rng = random.Random(batch * most)
    trees = [Tree.draw(rng, rng.randrange(most + 1)) for _ in range(batch - 1)] + [Tree.draw(rng, most)]
    step = [value.to(device) for value in batch_of(trees, most)]
    accepted = accept(*step)
    walks = [tree.walk() for tree in trees]
    assert accepted.num_accepted.tolist() == [len(walk) for walk in walks]
    depth = min(most, MAX_DEPTH)
    assert accepted.path.tolist() == [walk + [-1] * (depth - len(walk)) for walk in walks]
    last = [walk[-1] if walk else -1 for walk in walks]
    assert accepted.bonus.tolist() == [tree.targets[node + 1] for tree, node in zip(trees, last, strict=True)]
    for mine, theirs in zip(accepted, reference.accept(*step), strict=True):
        assert torch.equal(mine, theirs)


def test_zero_nodes_is_plain_decoding(device: str) -> None:
    none = torch.zeros(2, 0, dtype=torch.int64, device=device)
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    accepted = accept(none, none, zeros, torch.tensor([[7], [9]], device=device))
    assert accepted.path.shape == (2, 0)
    assert accepted.num_accepted.tolist() == [0, 0]
    assert accepted.bonus.tolist() == [7, 9]


def test_a_chain_is_accepted_to_the_depth_limit(device: str) -> None:
    nodes = MAX_DEPTH + 3
    chain = torch.arange(nodes, device=device)[None]
    targets = torch.arange(nodes + 1, device=device)[None]
    accepted = accept(chain, chain - 1, torch.tensor([nodes], device=device), targets)
    assert accepted.path.tolist() == [list(range(MAX_DEPTH))]
    assert accepted.bonus.tolist() == [MAX_DEPTH]
