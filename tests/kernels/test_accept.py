"""The acceptance walk, the reference's and the device's, against one written with ifs."""

import random
from collections.abc import Callable

import pytest
import torch

from kernels import settle as reference
from kernels.settle import Accepted
from kernels.tree_attention import MAX_DEPTH
from kernels.triton import settle as on_device
from tests.kernels.random_walks import Tree, batch_of

Accept = Callable[..., Accepted]


@pytest.fixture(params=[reference.accept, on_device.accept], ids=["reference", "triton"])
def accept(request: pytest.FixtureRequest) -> Accept:
    chosen: Accept = request.param
    return chosen


@pytest.mark.parametrize(("batch", "most"), [(1, 1), (1, 5), (3, 24), (64, 7), (5, 64), (2, 256)])
def test_equals_the_walk(batch: int, most: int, accept: Accept, device: str) -> None:
    rng = random.Random(batch * most)
    trees = [Tree.draw(rng, rng.randrange(most + 1)) for _ in range(batch - 1)] + [Tree.draw(rng, most)]
    accepted = accept(*(value.to(device) for value in batch_of(trees, most)))
    walks = [tree.walk() for tree in trees]
    assert accepted.num_accepted.tolist() == [len(walk) for walk in walks]
    depth = min(most, MAX_DEPTH)
    assert accepted.path.tolist() == [walk + [-1] * (depth - len(walk)) for walk in walks]
    last = [walk[-1] if walk else -1 for walk in walks]
    assert accepted.bonus.tolist() == [tree.targets[node + 1] for tree, node in zip(trees, last, strict=True)]


def test_many_small_trees() -> None:
    rng = random.Random(0)
    for nodes in (*range(25), *range(25)):
        trees = [Tree.draw(rng, rng.randrange(nodes + 1)) for _ in range(8)]
        accepted = reference.accept(*batch_of(trees, nodes))
        assert [[i for i in path if i >= 0] for path in accepted.path.tolist()] == [tree.walk() for tree in trees]


def test_zero_nodes_is_plain_decoding(accept: Accept, device: str) -> None:
    none = torch.zeros(2, 0, dtype=torch.int64, device=device)
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    accepted = accept(none, none, zeros, torch.tensor([[7], [9]], device=device))
    assert accepted.path.shape == (2, 0)
    assert accepted.num_accepted.tolist() == [0, 0]
    assert accepted.bonus.tolist() == [7, 9]


def test_first_of_equal_siblings_counts(accept: Accept, device: str) -> None:
    tokens, parents = torch.tensor([[4, 4, 5, 5]], device=device), torch.tensor([[-1, -1, 0, 1]], device=device)
    targets = torch.tensor([[4, 5, 5, 8, 9]], device=device)
    accepted = accept(tokens, parents, torch.tensor([4], device=device), targets)
    assert accepted.path.tolist() == [[0, 2, -1, -1]]
    assert accepted.bonus.tolist() == [8]


def test_a_chain_is_accepted_to_the_depth_limit(accept: Accept, device: str) -> None:
    nodes = MAX_DEPTH + 3
    chain = torch.arange(nodes, device=device)[None]
    targets = torch.arange(nodes + 1, device=device)[None]
    accepted = accept(chain, chain - 1, torch.tensor([nodes], device=device), targets)
    assert accepted.path.tolist() == [list(range(MAX_DEPTH))]
    assert accepted.bonus.tolist() == [MAX_DEPTH]
