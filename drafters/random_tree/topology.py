"""Random shapes of trees and sibling tokens that never repeat. Knows nothing of texts or sequences.

Legend: batch, nodes as in drafters/tree.py.
"""

import torch
from torch import Tensor

from drafters.tree import MAX_DEPTH, ROOT

_STRIDE = 2_147_483_647  # a prime above any vocabulary, hence coprime to its size: multiples of it never collide early


def random_depths(batch: int, nodes: int, generator: torch.Generator) -> Tensor:
    """Depths that rise by at most one from node to node, each tree with its own taste between bush and chain.

    -> [batch, nodes] int64 in 1..MAX_DEPTH
    """
    taste = torch.rand(batch, 1, generator=generator, device=generator.device)
    deeper = torch.rand(batch, nodes, generator=generator, device=generator.device) < taste
    deeper[:, :1] = True
    return deeper.long().cumsum(1).clamp(max=MAX_DEPTH)


def random_parents(depths: Tensor, generator: torch.Generator) -> Tensor:
    """For each node a random one of the level above. # depths [batch, nodes] rising -> [batch, nodes]"""
    first = torch.searchsorted(depths, depths - 1)
    behind = torch.searchsorted(depths, depths)
    draw = torch.rand(depths.shape, generator=generator, device=generator.device)
    parents = first + (draw * (behind - first)).long()
    return torch.where(depths == 1, ROOT, parents)


def sibling_ranks(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Each node's place among the children of its parent, and how many they are. # two [batch, nodes]"""
    same = parents[:, :, None] == parents[:, None, :]  # [batch, nodes, nodes]
    return same.tril(-1).sum(-1), same.sum(-1)


def random_tokens(parents: Tensor, ranks: Tensor, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Random tokens, different for all children of one parent (given no more children than tokens)."""
    batch, nodes = parents.shape
    bases = torch.randint(vocab_size, (batch, nodes + 1), generator=generator, device=generator.device)
    return (bases.gather(1, parents + 1) + ranks * (_STRIDE % vocab_size)) % vocab_size
