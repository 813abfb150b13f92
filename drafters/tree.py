"""Draft trees and what verification says about them: plain tensor records that every drafter and the engine share.
Legend: batch = sequences in the step, nodes = padded node count, depth = longest accepted path.
The root (the last committed token, depth 0) is not a node: a node whose parent is -1 hangs below the root."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.tree_attention import MAX_DEPTH as MAX_DEPTH
from kernels.tree_attention import MAX_NODES as MAX_NODES

NO_HASH = 0
"""Of what is no node: a path has it with probability of 2^-64."""

ROOT = -1
"""Parent index of a node that hangs directly below the root; also the padding of node indices."""


class DraftTree(NamedTuple):
    """Nodes to verify, in an order where every parent stands before its children. Also the form of a drafter's
    *candidates*: a tree from which the budget keeps the likeliest nodes."""

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
        return DraftTree(*(value[lines] for value in self))

    def first(self, batch: int, width: int | None = None) -> "DraftTree":
        """The first trees, and of each so many nodes, as views."""
        tokens, parents, depths, survival = (value[:batch, :width] for value in self[:4])
        return DraftTree(tokens, parents, depths, survival, self.num_nodes[:batch])

    @property
    def valid(self) -> Tensor:
        """True for nodes, False for padding. # [batch, nodes]"""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.num_nodes[:, None]

    def to(self, device: torch.device) -> "DraftTree":
        """The same trees on another device."""
        return DraftTree(*(value.to(device) for value in self))

    @staticmethod
    def of(tokens: Tensor, parents: Tensor) -> "DraftTree":
        """Trees without padding whose nodes all survive. # tokens, parents [batch, nodes] int64"""
        depths = torch.ones_like(parents)
        for _ in range(min(parents.shape[1], MAX_DEPTH)):
            depths = torch.where(parents < 0, 1, depths.gather(1, parents.clamp(min=0)) + 1)
        num_nodes = torch.full((tokens.shape[0],), tokens.shape[1], device=tokens.device)
        return DraftTree(tokens, parents, depths, torch.ones_like(tokens, dtype=torch.float32), num_nodes)

    @staticmethod
    def concatenated(trees: Sequence["DraftTree"]) -> "DraftTree":
        """One batch of several trees of equal width."""
        return DraftTree(*(torch.cat(values) for values in zip(*trees, strict=True)))

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
    # parents [batch, nodes] -> [batch, nodes, nodes] bool"""
    batch, nodes = parents.shape
    if nodes == 0:
        return parents.new_zeros(batch, 0, 0, dtype=torch.bool)
    root = torch.full((batch, 1), nodes, dtype=parents.dtype, device=parents.device)
    # The root becomes the last row, its own parent and nobody's ancestor, so that every jump is defined.
    jump = torch.cat([torch.where(parents < 0, nodes, parents), root], dim=1)  # [batch, nodes + 1]
    above = torch.eye(nodes + 1, nodes, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    for _ in range(_doublings(nodes)):
        above = above | above.gather(1, jump[:, :, None].expand(-1, -1, nodes))
        jump = jump.gather(1, jump)
    return above[:, :nodes]


def path_tokens(tokens: Tensor, ancestors: Tensor, depth: int) -> Tensor:
    """The tokens from the root's child down to each row's node, as far as `depth`; row 0 is the root, which has none.
    # tokens [batch, nodes], ancestors [batch, nodes, nodes] -> [batch, nodes + 1, depth] int64, -1 padded"""
    batch, nodes = tokens.shape
    level = ancestors.sum(-1) - 1  # [batch, nodes]
    column = torch.where(ancestors, level[:, None, :], depth).clamp(max=depth)  # [batch, nodes, nodes]
    paths = tokens.new_full((batch, nodes + 1, depth + 1), -1, dtype=torch.int64)
    paths[:, 1:].scatter_(2, column, tokens.long()[:, None, :].expand(-1, nodes, -1))
    return paths[:, :, :depth]


@cache
def _factors(device: torch.device) -> Tensor:
    """By depth. # -> [MAX_DEPTH + 1] int64"""
    generator = torch.Generator().manual_seed(2)
    return (torch.randint(-(2**62), 2**62, (MAX_DEPTH + 1,), generator=generator) | 1).to(device)


def path_hashes(tokens: Tensor, parents: Tensor, depths: Tensor) -> Tensor:
    """A 64-bit sum over the path of tokens times random odd numbers by depth; equal paths have equal sums. Different
    ones collide with probability 2^-64, and would only draft a wrong token. # -> [batch, nodes] int64"""
    return accumulated(pad((tokens + 1) * _factors(tokens.device)[depths], (0, 1)), parents, torch.add)


def accumulated(values: Tensor, parents: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Values combined from the root's child down to each node. # values [batch, nodes + 1], the last column the root's,
    which changes nothing; parents [batch, nodes] -> like parents"""
    nodes = parents.shape[1]
    jump = pad(torch.where(parents < 0, nodes, parents), (0, 1), value=nodes)  # the root is its own parent
    for _ in range(_doublings(nodes)):
        values, jump = combine(values, values.gather(1, jump)), jump.gather(1, jump)
    return values[:, :nodes]


def _doublings(nodes: int) -> int:
    """Jumps to the parent's parent that reach the root from any of so many nodes."""
    return max(0, min(nodes, MAX_DEPTH) - 1).bit_length()


def node_hashes(tree: Candidates) -> Tensor:
    """`path_hashes` of a tree's nodes, NO_HASH for its padding. # -> [batch, nodes] int64"""
    return path_hashes(tree.tokens, tree.parents, tree.depths).masked_fill(~tree.valid, NO_HASH)


def prefix_hashes(tokens: Tensor) -> Tensor:
    """The same sums for the beginnings of texts after the root, as far as trees reach.
    # tokens [batch, count, ...] -> [batch, at most MAX_DEPTH, ...] int64"""
    tokens = tokens[:, :MAX_DEPTH]
    factors = _factors(tokens.device)[1 : tokens.shape[1] + 1]
    return ((tokens + 1) * factors.view(-1, *[1] * (tokens.ndim - 2))).cumsum(1)


def came_true(hashes: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    """Which nodes lie on the committed text. # hashes [batch, nodes], tokens [batch, depth], counts [batch] -> bool"""
    wanted = prefix_hashes(tokens)
    known = torch.arange(wanted.shape[1], device=tokens.device) < counts[:, None]
    return ((hashes[:, :, None] == wanted[:, None]) & known[:, None]).any(2)


def joined_trees(trees: Sequence[Candidates]) -> Candidates:
    """Several trees of each sequence as one raw tree, not merged yet."""
    offsets = [sum(tree.width for tree in trees[:place]) for place in range(len(trees))]
    parents = [
        torch.where(tree.parents < 0, ROOT, tree.parents + offset) for tree, offset in zip(trees, offsets, strict=True)
    ]
    survival = [tree.survival * tree.valid for tree in trees]
    return DraftTree(
        tokens=torch.cat([tree.tokens for tree in trees], dim=1),
        parents=torch.cat(parents, dim=1),
        depths=torch.cat([tree.depths for tree in trees], dim=1),
        survival=torch.cat(survival, dim=1),
        num_nodes=(torch.cat(survival, dim=1) > 0).sum(1),
    )


def merge_trees(raw: Candidates, max_nodes: int) -> tuple[Candidates, Tensor]:
    """The likeliest nodes of a raw tree, each path once, by falling survival, and which raw nodes they were.
    Raw: parents before children, survival 0 = absent, `num_nodes` not read. Of equal paths the likeliest stays and
    takes over the others' children, so that survival still falls along every path. # -> tree, [batch, nodes] int64"""
    hashes = path_hashes(raw.tokens, raw.parents, raw.depths)
    order = raw.survival.sort(dim=1, descending=True, stable=True).indices  # likeliest first
    representative = _first_with_equal_hash(hashes, order)
    is_kept = (representative == torch.arange(raw.width, device=order.device)) & (raw.survival > 0)
    kept_survival = raw.survival * is_kept
    leaders = pad(representative, (1, 0), value=ROOT)
    unified = DraftTree(raw.tokens, leaders.gather(1, raw.parents + 1), raw.depths, kept_survival, raw.num_nodes)
    return likeliest_nodes(unified, max_nodes)


def likeliest_nodes(raw: Candidates, max_nodes: int) -> tuple[Candidates, Tensor]:
    """The likeliest nodes of a raw tree in which no path stands twice, as of `merge_trees`."""
    best = raw.survival.sort(dim=1, descending=True, stable=True)
    survival, chosen = best.values[:, :max_nodes], best.indices[:, :max_nodes]
    exists = survival > 0
    tree = DraftTree(
        tokens=raw.tokens.gather(1, chosen) * exists,
        parents=renumbered(raw.parents, chosen).masked_fill(~exists, ROOT),
        depths=raw.depths.gather(1, chosen) * exists,
        survival=survival,
        num_nodes=exists.sum(1),
    )
    return tree, chosen


def _first_with_equal_hash(hashes: Tensor, order: Tensor) -> Tensor:
    """For each node the first node in `order` with the same path. # both [batch, nodes] -> [batch, nodes] int64"""
    ordered = hashes.gather(1, order)
    grouped = ordered.sort(dim=1, stable=True)  # equal hashes side by side, likeliest first
    begins = pad(grouped.values[:, 1:] != grouped.values[:, :-1], (1, 0), value=True)
    places = torch.arange(hashes.shape[1], device=hashes.device).expand_as(hashes)
    head = torch.where(begins, places, 0).cummax(1).values  # where each group begins
    leaders = order.gather(1, grouped.indices.gather(1, head))
    members = order.gather(1, grouped.indices)
    return torch.empty_like(members).scatter_(1, members, leaders)


def renumbered(parents: Tensor, chosen: Tensor) -> Tensor:
    """Parents of the chosen nodes in the new numbers. # parents [batch, nodes], chosen [batch, width] -> like chosen"""
    places = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    numbers = parents.new_full((parents.shape[0], parents.shape[1] + 1), ROOT)  # old + 1 -> new
    numbers.scatter_(1, chosen + 1, places)
    return numbers.gather(1, parents.gather(1, chosen) + 1)


def select_nodes(candidates: Candidates, num_keep: Tensor, width: int) -> tuple[DraftTree, Tensor]:
    """The tree of each sequence's likeliest nodes by depth, then survival, and which candidates these were; those of
    padding mean nothing. Survival never rises along a path, so any prefix of the sorted nodes is a valid tree.
    # num_keep [batch], at most `width`, to which the result is padded -> tree, [batch, width] int64"""
    width = min(width, candidates.width)
    if width == 0:
        tree = DraftTree.empty(candidates.batch, candidates.tokens.device)
        return tree, tree.parents
    num_nodes = torch.minimum(num_keep, candidates.num_nodes)
    by_survival = _falling(candidates).indices  # [batch, nodes]
    kept = torch.arange(by_survival.shape[1], device=by_survival.device) < num_nodes[:, None]
    depths = candidates.depths.gather(1, by_survival).masked_fill(~kept, MAX_DEPTH + 1)
    chosen = by_survival.gather(1, depths.sort(dim=1, stable=True).indices)[:, :width]
    valid = kept[:, :width]
    tree = DraftTree(
        tokens=candidates.tokens.gather(1, chosen) * valid,
        parents=renumbered(candidates.parents, chosen).masked_fill(~valid, ROOT),
        depths=candidates.depths.gather(1, chosen) * valid,
        survival=candidates.survival.gather(1, chosen) * valid,
        num_nodes=num_nodes,
    )
    return tree, chosen


def survival_order(candidates: Candidates, limits: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """All sequences' candidates sorted together, likeliest first, at most limits[b] of sequence b; survival is
    multiplied by weights, what one token of each sequence counts. # limits, weights [batch]
    -> survival [batch * nodes] float32, owner sequence [batch * nodes] int64; 0 and -1 beyond those that exist"""
    nodes = candidates.tokens.shape[1]
    survival = _falling(candidates).values  # [batch, nodes]
    if weights is not None:
        survival = survival * weights[:, None]
    ranks = torch.arange(nodes, device=survival.device)
    allowed = ranks < torch.minimum(limits, candidates.num_nodes)[:, None]
    together = survival.masked_fill(~allowed, -1.0).flatten().sort(descending=True, stable=True)
    exists = together.values >= 0
    owners = torch.where(exists, together.indices // max(nodes, 1), -1)
    return together.values * exists, owners


def _falling(candidates: Candidates) -> torch.return_types.sort:
    return candidates.survival.masked_fill(~candidates.valid, -1.0).sort(dim=1, descending=True, stable=True)
