"""The lattice of a block: who is whose parent, what survives, and where the next block starts."""

from itertools import product
from math import prod

import torch

from drafters.lattice import Chain, Lattice, Origin
from drafters.tree import MAX_DEPTH, ROOT


def lattice(conditional: list[list[float]], origin: Origin | None = None, first_number: int = 0) -> Lattice:
    """One sequence, one block. Tokens are 10 * position + rank."""
    odds = torch.tensor([[conditional]])
    block, ranks = odds.shape[2:]
    tokens = (10 * torch.arange(block)[:, None] + torch.arange(ranks))[None, None]
    return Lattice(origin or Origin.root(1, odds.device), tokens, odds, first_number)


def test_the_first_ranks_are_the_spine_and_the_others_its_leaves() -> None:
    tokens, parents, depths, survival = lattice([[0.5, 0.25], [0.5, 0.1]]).nodes()
    assert tokens.tolist() == [[0, 1, 10, 11]]
    assert parents.tolist() == [[ROOT, ROOT, 0, 0]]
    assert depths.tolist() == [[1, 1, 2, 2]]
    assert survival.tolist() == [[0.5, 0.25, 0.25, torch.tensor(0.5 * 0.1).item()]]


def test_a_later_block_hangs_below_its_start() -> None:
    origin = Origin(torch.tensor([[7]]), torch.tensor([[3]]), torch.tensor([[0.5]]))
    _, parents, depths, survival = lattice([[0.5, 0.25], [0.5, 0.1]], origin, first_number=20).nodes()
    assert parents.tolist() == [[7, 7, 20, 20]]
    assert depths.tolist() == [[4, 4, 5, 5]]
    assert survival[0, 0] == 0.25


def test_nothing_grows_deeper_than_trees_may_be() -> None:
    origin = Origin(torch.tensor([[0]]), torch.tensor([[MAX_DEPTH - 1]]), torch.tensor([[1.0]]))
    _, _, depths, survival = lattice([[0.5, 0.25], [0.5, 0.1]], origin).nodes()
    assert (survival > 0).tolist() == [[True, True, False, False]]
    assert depths.max() <= MAX_DEPTH


def test_blocks_start_where_they_are_likely_to_be_reached_and_nobody_went_on() -> None:
    # Spine 0.9, 0.81; the leaf at the first position 0.09, at the second 0.9 * 0.05.
    picked = lattice([[0.9, 0.09], [0.9, 0.05]]).pick(3)
    assert picked.tokens.tolist() == [[10, 0, 1]]  # the end of the spine; its middle, 0.9 * (1 - 0.9), ties the leaf
    assert picked.position.tolist() == [[1, 0, 0]]
    assert picked.origin.depth.tolist() == [[2, 1, 1]]
    assert picked.origin.node.tolist() == [[2, 0, 1]]


def test_starts_are_chosen_over_all_blocks_of_a_sequence() -> None:
    origin = Origin(torch.tensor([[0, 1]]), torch.tensor([[1, 1]]), torch.tensor([[0.9, 0.1]]))
    odds = torch.tensor([[[[0.5, 0.2]], [[0.9, 0.05]]]])
    tokens = torch.arange(4).view(1, 2, 1, 2)
    picked = Lattice(origin, tokens, odds, 5).pick(2)
    assert picked.start.tolist() == [[0, 0]]
    assert picked.origin.node.tolist() == [[5, 6]]


def test_of_a_chain_the_likeliest_paths_go_on() -> None:
    """Its likeliest nodes are those of all paths there are, each under its parent."""
    block, ranks, paths, most = 4, 5, 4, 12
    odds = torch.rand(2, 1, block, ranks, generator=torch.Generator().manual_seed(0)) * 0.9
    tokens = (10 * torch.arange(block)[:, None] + torch.arange(ranks)).expand(2, 1, -1, -1)
    said, parents, depths, survival = Chain(Origin.root(2, odds.device), tokens, odds, 0, paths=paths).nodes()
    for line in range(2):
        every = {
            tuple(10 * place + rank for place, rank in enumerate(path)): prod(
                float(odds[line, 0, place, rank]) for place, rank in enumerate(path)
            )
            for depth in range(1, block + 1)
            for path in product(range(ranks), repeat=depth)
        }
        likeliest = sorted(every, key=lambda path: -every[path])[:most]
        found = {}
        for node in survival[line].argsort(descending=True)[:most].tolist():
            path, above = [], node
            while above != ROOT:
                path.append(int(said[line, above]))
                assert depths[line, above] == depths[line, node] - len(path) + 1
                above = int(parents[line, above])
            found[tuple(reversed(path))] = float(survival[line, node])
        assert list(found) == likeliest
        assert all(abs(found[path] - every[path]) < 1e-6 for path in likeliest)
