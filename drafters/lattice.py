"""Nodes of a draft tree that grows by forwards: who is whose parent, what survives, and where the next forward starts.

Each forward runs some blocks, which start at nodes of the one before. A block's first ranks form its spine; the other
ranks hang beside it as leaves. Blocks of one position make a beam: all of its nodes are leaves, and the likeliest paths
are those that go on. A chain is a block that says the same behind every path, so that its own likeliest paths go on.
Legend: batch, starts = blocks begun at once, block = positions of one, rank = TOP, nodes = starts * block * rank."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.tree import MAX_DEPTH, ROOT


class Origin(NamedTuple):
    """The nodes (or roots) at which one forward's blocks begin, all [batch, starts]."""

    node: Tensor  # int64, number among all nodes grown so far, ROOT for the root
    depth: Tensor  # int64, 0 for the root
    survival: Tensor  # float32, 1 for the root; 0 where nothing can begin, and no node then survives

    @staticmethod
    def root(batch: int, device: torch.device) -> "Origin":
        zeros = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        return Origin(zeros + ROOT, zeros, zeros + 1.0)


class Picked(NamedTuple):
    """Nodes chosen as starts of the next forward, all [batch, starts]."""

    origin: Origin
    tokens: Tensor  # int64
    start: Tensor  # int64, which start's block the node belongs to
    position: Tensor  # int64, which of its block's positions, 0-based


class Lattice:
    """The nodes of one forward's blocks."""

    def __init__(self, origin: Origin, tokens: Tensor, conditional: Tensor, first_number: int) -> None:
        """tokens, conditional [batch, starts, block, rank]; numbers of nodes count up from `first_number`."""
        self.origin = origin
        self.tokens = tokens
        spine = conditional[..., 0].cumprod(-1) * origin.survival[..., None]  # [batch, starts, block]
        above = torch.cat([origin.survival[..., None], spine[..., :-1]], dim=-1)
        block = torch.arange(tokens.shape[2], device=tokens.device)
        self.depths = origin.depth[..., None] + 1 + block  # [batch, starts, block]
        fits = (self.depths <= MAX_DEPTH)[..., None]
        self.survival = above[..., None] * conditional * fits  # [batch, starts, block, rank]
        self._continued = pad(conditional[..., 1:, 0], (0, 1))  # likelihood that the spine's next node follows
        self._numbers = torch.arange(tokens[0].numel(), device=tokens.device) + first_number

    def nodes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, parents by number, depths and survival of all nodes; survival 0 = absent. # four [batch, nodes]"""
        wide = self.tokens.shape
        spine = self._numbers.view(wide[1:])[..., 0].expand(wide[:3])  # [batch, starts, block]
        parents = torch.cat([self.origin.node[..., None], spine[..., :-1]], dim=-1)
        depths = self.depths.clamp(max=MAX_DEPTH)
        by_node = (self.tokens, parents[..., None].expand(wide), depths[..., None].expand(wide), self.survival)
        tokens, parents, depths, survival = (value.flatten(1) for value in by_node)
        return tokens, parents, depths, survival

    def pick(self, number: int) -> Picked:
        """The nodes most worth another block: likely to be reached, and not continued by this one."""
        gain = self.survival.clone()
        gain[..., 0] *= 1.0 - self._continued
        best = gain.flatten(1).topk(min(number, len(self._numbers)), dim=1).indices  # [batch, starts]
        block, ranks = self.tokens.shape[2:]
        position = best // ranks  # among those of all starts
        tokens, depths, survival = (value.flatten(1) for value in (self.tokens, self.depths, self.survival))
        origin = Origin(self._numbers[best], depths.gather(1, position), survival.gather(1, best))
        return Picked(origin, tokens.gather(1, best), start=position // block, position=position % block)


class Chain:
    """The nodes of a block at the root, as of `Lattice`: at each position as many of the likeliest paths go on.
    Numbers count by path, position and rank."""

    def __init__(self, origin: Origin, tokens: Tensor, conditional: Tensor, first_number: int, *, paths: int) -> None:
        """tokens, conditional [batch, 1, block, rank]"""
        block, ranks = tokens.shape[2:]
        numbers = torch.arange(paths * block * ranks, device=tokens.device).view(paths, block, ranks) + first_number
        depths = origin.depth[..., None] + 1 + torch.arange(block, device=tokens.device)  # [batch, 1, block]
        conditional = conditional * (depths <= MAX_DEPTH)[..., None]
        above, parent = pad(origin.survival, (0, paths - 1)), origin.node.expand(-1, paths)  # both [batch, paths]
        said, parents = list[Tensor](), list[Tensor]()
        for position in range(block):
            parents.append(parent)
            said.append(above[:, :, None] * conditional[:, :, position])  # [batch, paths, rank]
            above, best = said[-1].flatten(1).topk(paths, dim=1)
            parent = numbers[:, position].flatten()[best]
        wide = (-1, paths, -1, ranks)
        self._by_node = (
            tokens.expand(wide),
            torch.stack(parents, dim=2)[..., None].expand(wide),
            depths.clamp(max=MAX_DEPTH)[..., None].expand(wide),
            torch.stack(said, dim=2),
        )

    def nodes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As of `Lattice`. # four [batch, paths * block * rank]"""
        tokens, parents, depths, survival = (value.flatten(1) for value in self._by_node)
        return tokens, parents, depths, survival


Witness = Callable[[Lattice, Tensor, Tensor], None]
"""Is told of each forward what it says of the tokens that its nodes were chosen from: before the sampling noise, and
not of forwards that are captured. # logits [batch, starts, block, draft_vocab], their target ids [draft_vocab] int64"""


def unwitnessed(lattice: Lattice, logits: Tensor, ids: Tensor) -> None:
    """A witness that keeps nothing."""
