"""Nodes of a block whose distributions do not depend on the path."""

from itertools import product
from math import prod

import torch

from drafters.specblock.blocks import path_nodes
from drafters.tree import ROOT
from kernels.lattice import StartNodes


def test_the_likeliest_paths_go_on() -> None:
    """Its likeliest nodes are those of all paths there are, each under its parent."""
    block, ranks, paths, most = 4, 5, 4, 12
    odds = torch.rand(2, 1, block, ranks, generator=torch.Generator().manual_seed(0)) * 0.9
    tokens = (10 * torch.arange(block)[:, None] + torch.arange(ranks)).expand(2, 1, -1, -1)
    trust = torch.linspace(0.8, 1.05, block * ranks).view(block, ranks)
    said, parents, depths, survival = path_nodes(StartNodes.root(2, odds.device), tokens, odds, trust, 0.0, paths=paths)
    odds = odds * trust
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
