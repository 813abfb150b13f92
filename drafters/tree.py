"""Draft trees and what verification says about them: plain tensor records that every drafter and the engine share.

Legend: batch = sequences in the step, nodes = padded node count, depth = longest accepted path.
The root (the last committed token, depth 0) is not a node: a node whose parent is -1 hangs below the root.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.tree_attention import MAX_DEPTH, MAX_NODES

__all__ = [
    "DOUBLINGS",
    "MAX_DEPTH",
    "MAX_NODES",
    "ROOT",
    "Candidates",
    "DraftTree",
    "VerifyResult",
    "ancestor_matrix",
    "path_tokens",
]

DOUBLINGS = (MAX_DEPTH - 1).bit_length()
"""Jumps to the parent's parent that reach the root from any node."""

ROOT = -1
"""Parent index of a node that hangs directly below the root; also the padding of node indices."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes to verify, in an order where every parent stands before its children.

    Also the form of a drafter's *candidates*: a tree from which the budget keeps the likeliest nodes.
    """

    tokens: Tensor  # [batch, nodes] int64, 0 padded
    parents: Tensor  # [batch, nodes] int64, parents[i] < i, ROOT below the root
    depths: Tensor  # [batch, nodes] int64, 1 below the root, 0 padded
    survival: Tensor  # [batch, nodes] float32, estimated probability to be on the accepted path, 0 padded
    num_nodes: Tensor  # [batch] int64

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """Padded number of nodes."""
        return self.tokens.shape[1]

    def take(self, lines: Tensor) -> "DraftTree":
        """The trees of some sequences. # lines [picked] int64"""
        return DraftTree(*(value[lines] for value in self.fields))

    def first(self, batch: int, width: int | None = None) -> "DraftTree":
        """The first trees, and of each so many nodes, as views."""
        tokens, parents, depths, survival = (value[:batch, :width] for value in self.fields[:4])
        return DraftTree(tokens, parents, depths, survival, self.num_nodes[:batch])

    @property
    def valid(self) -> Tensor:
        """True for nodes, False for padding. # [batch, nodes]"""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.num_nodes[:, None]

    def to(self, device: torch.device) -> "DraftTree":
        """The same trees on another device."""
        return DraftTree(*(value.to(device) for value in self.fields))

    @staticmethod
    def of(tokens: Tensor, parents: Tensor) -> "DraftTree":
        """Trees without padding whose nodes all survive. # tokens, parents [batch, nodes] int64"""
        depths = torch.ones_like(parents)
        for _ in range(MAX_DEPTH):
            depths = torch.where(parents < 0, 1, depths.gather(1, parents.clamp(min=0)) + 1)
        num_nodes = torch.full((tokens.shape[0],), tokens.shape[1], device=tokens.device)
        return DraftTree(tokens, parents, depths, torch.ones_like(tokens, dtype=torch.float32), num_nodes)

    @staticmethod
    def concatenated(trees: Sequence["DraftTree"]) -> "DraftTree":
        """One batch of several trees of equal width."""
        return DraftTree(*(torch.cat(values) for values in zip(*(tree.fields for tree in trees), strict=True)))

    @property
    def fields(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.parents, self.depths, self.survival, self.num_nodes

    @staticmethod
    def empty(batch: int, device: torch.device | str = "cpu") -> "DraftTree":
        """The tree of zero nodes: verifying it is plain decoding."""
        none = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return DraftTree(none, none, none, none.float(), torch.zeros(batch, dtype=torch.int64, device=device))


Candidates = DraftTree


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What the target said of one step's trees."""

    path: Tensor  # [batch, depth] int64, accepted node indices from the root down, -1 padded
    num_accepted: Tensor  # [batch] int64, accepted length: nodes on the path, without root and bonus
    bonus: Tensor  # [batch] int64, the target's own token after the accepted path
    target_tokens: Tensor  # [batch, nodes + 1] int64, the target's choice after the root and after each node


def ancestor_matrix(parents: Tensor) -> Tensor:
    """True at [b, i, j] where node j is on the path from the root to node i, i itself included.

    parents [batch, nodes] -> [batch, nodes, nodes] bool
    """
    batch, nodes = parents.shape
    if nodes == 0:
        return parents.new_zeros(batch, 0, 0, dtype=torch.bool)
    root = torch.full((batch, 1), nodes, dtype=parents.dtype, device=parents.device)
    # The root becomes the last row, its own parent and nobody's ancestor, so that every jump is defined.
    jump = torch.cat([torch.where(parents < 0, nodes, parents), root], dim=1)  # [batch, nodes + 1]
    above = torch.eye(nodes + 1, nodes, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    for _ in range(DOUBLINGS):
        above = above | above.gather(1, jump[:, :, None].expand(-1, -1, nodes))
        jump = jump.gather(1, jump)
    return above[:, :nodes]


def path_tokens(tokens: Tensor, ancestors: Tensor, depth: int) -> Tensor:
    """The tokens from the root's child down to each row's node; row 0 is the root, which has none.

    tokens [batch, nodes], ancestors [batch, nodes, nodes] -> [batch, nodes + 1, depth] int64, -1 padded;
    what lies deeper than `depth` is left out.
    """
    batch, nodes = tokens.shape
    level = ancestors.sum(-1) - 1  # [batch, nodes]
    column = torch.where(ancestors, level[:, None, :], depth).clamp(max=depth)  # [batch, nodes, nodes]
    paths = tokens.new_full((batch, nodes + 1, depth + 1), -1, dtype=torch.int64)
    paths[:, 1:].scatter_(2, column, tokens.long()[:, None, :].expand(-1, nodes, -1))
    return paths[:, :, :depth]
