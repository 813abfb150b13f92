"""Draft trees, and the ops that merge and prune them and compare them with committed tokens.
Legend: batch = sequences in the step, nodes = padded number of nodes. The root (the last committed token, depth 0) is
not a node: a node whose parent is -1 is a child of the root."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.tree_attention import MAX_DEPTH

ROOT = -1
"""Parent index of a child of the root; also the padding of node indices."""


class DraftTree(NamedTuple):
    """A batch of draft trees to verify, parents before children; also a drafter's *candidates*, from which the budget
    keeps the likeliest nodes."""

    tokens: Tensor  # [batch, nodes] int64, 0 padded
    parents: Tensor  # [batch, nodes] int64, parents[i] < i, ROOT below the root
    depths: Tensor  # [batch, nodes] int64, 1 for children of the root, 0 padded
    survival: Tensor  # [batch, nodes] float32, estimated probability of being on the accepted path, 0 padded
    num_nodes: Tensor  # [batch] int64

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """Padded number of nodes."""
        return self.tokens.shape[1]

    def take(self, lines: Tensor) -> "DraftTree":
        """Select the trees of some sequences. # lines [picked] int64"""
        return DraftTree(*(value[lines] for value in self))

    def first(self, batch: int, width: int | None = None) -> "DraftTree":
        """Return views of the first `batch` trees, cut to their first `width` nodes."""
        if batch == self.batch and width in (None, self.width):
            return self
        tokens, parents, depths, survival = (value[:batch, :width] for value in self[:4])
        return DraftTree(tokens, parents, depths, survival, self.num_nodes[:batch])

    @property
    def valid(self) -> Tensor:
        """True for nodes, False for padding. # [batch, nodes]"""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.num_nodes[:, None]

    def to(self, device: torch.device) -> "DraftTree":
        """Copy the trees to a device."""
        return DraftTree(*(value.to(device) for value in self))

    @staticmethod
    def of(tokens: Tensor, parents: Tensor) -> "DraftTree":
        """Build trees without padding whose nodes have survival 1. # tokens, parents [batch, nodes] int64"""
        depths = torch.ones_like(parents)
        for _ in range(min(parents.shape[1], MAX_DEPTH)):
            depths = torch.where(parents < 0, 1, depths.gather(1, parents.clamp(min=0)) + 1)
        num_nodes = torch.full((tokens.shape[0],), tokens.shape[1], device=tokens.device)
        return DraftTree(tokens, parents, depths, torch.ones_like(tokens, dtype=torch.float32), num_nodes)

    @staticmethod
    def concatenated(trees: Sequence["DraftTree"]) -> "DraftTree":
        """Concatenate batches of trees of equal width."""
        return DraftTree(*(torch.cat(values) for values in zip(*trees, strict=True)))

    @staticmethod
    def padding(batch: int, width: int, device: torch.device | str = "cpu") -> "DraftTree":
        """Build trees of 0 nodes, padded to `width`. # [batch, width]"""
        nodes = torch.zeros(batch, width, dtype=torch.int64, device=device)
        return DraftTree(nodes, nodes + ROOT, nodes.clone(), nodes.float(), nodes.new_zeros(batch))

    @staticmethod
    def empty(batch: int, device: torch.device | str = "cpu") -> "DraftTree":
        """Build trees of 0 nodes and width 0: verifying them is plain decoding. # [batch, 0]"""
        none = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return DraftTree(none, none, none, none.float(), torch.zeros(batch, dtype=torch.int64, device=device))


class Fates(NamedTuple):
    """Outcome of proposed nodes once tokens are committed; both tensors [batch, nodes] bool."""

    tried: Tensor  # the path to the parent is committed, and a token after it: only such nodes count as evidence
    came_true: Tensor  # the path to the node, itself included, is committed


def fates(tokens: Tensor, parents: Tensor, depths: Tensor, committed: Tensor, counts: Tensor) -> Fates:
    """Determine which nodes the committed tokens decided (`tried`), and which of them they contain (`came_true`).
    # tokens, parents, depths [batch, nodes] int64 in any order, depth 0 = padding; committed [batch, longest] int64,
    tokens after the root; counts [batch] int64, number of valid tokens in `committed` -> [batch, nodes]"""
    places = (depths - 1).clamp(0, committed.shape[1] - 1)
    known = (depths > 0) & (depths <= counts[:, None])
    equal = known & (tokens == committed.gather(1, places))
    came_true = accumulated(pad(equal, (0, 1), value=True), parents, torch.logical_and)
    above = pad(came_true, (1, 0), value=True).gather(1, parents + 1)
    return Fates(above & known, came_true)


def merge_trees(raw: DraftTree, max_nodes: int) -> tuple[DraftTree, Tensor]:
    """Keep the likeliest nodes of raw trees, each path once, sorted by falling survival; also returns their indices in
    the raw trees, undefined for padding. In a raw tree parents precede children, nodes of survival 0 are absent, and
    `num_nodes` is ignored. Of equal paths the likeliest one stays and gets the others' children, so that survival still
    falls along every path. # -> tree, [batch, nodes] int64"""
    hashes = path_hashes(raw.tokens, raw.parents, raw.depths)
    order = raw.survival.sort(dim=1, descending=True, stable=True).indices  # likeliest first
    representative = _first_with_equal_hash(hashes, order)
    is_kept = (representative == torch.arange(raw.width, device=order.device)) & (raw.survival > 0)
    leaders = pad(representative, (1, 0), value=ROOT)
    unified = raw._replace(parents=leaders.gather(1, raw.parents + 1), survival=raw.survival * is_kept)
    return likeliest_nodes(unified, max_nodes)


def likeliest_nodes(raw: DraftTree, max_nodes: int) -> tuple[DraftTree, Tensor]:
    """Keep the likeliest nodes, as `merge_trees` does, of raw trees in which no path occurs twice.
    # -> tree, [batch, nodes] int64"""
    best = raw.survival.sort(dim=1, descending=True, stable=True)
    survival, chosen = best.values[:, :max_nodes], best.indices[:, :max_nodes]
    exists = survival > 0
    tree = DraftTree(
        tokens=raw.tokens.gather(1, chosen) * exists,
        parents=_renumbered(raw.parents, chosen).masked_fill(~exists, ROOT),
        depths=raw.depths.gather(1, chosen) * exists,
        survival=survival,
        num_nodes=exists.sum(1),
    )
    return tree, chosen


def select_nodes(candidates: DraftTree, num_keep: Tensor, width: int) -> tuple[DraftTree, Tensor]:
    """Keep each sequence's likeliest nodes, sorted by depth, then by survival; also returns their indices among the
    candidates, undefined for padding. Survival never rises along a path, so the likeliest nodes always form a tree.
    # num_keep [batch], number of nodes to keep, at most `width`, to which the result is padded -> tree, [batch, width]
    int64"""
    width = min(width, candidates.width)
    if width == 0:
        tree = DraftTree.empty(candidates.batch, candidates.tokens.device)
        return tree, tree.parents
    num_nodes = torch.minimum(num_keep, candidates.num_nodes)
    by_survival = falling(candidates).indices  # [batch, nodes]
    kept = torch.arange(by_survival.shape[1], device=by_survival.device) < num_nodes[:, None]
    depths = candidates.depths.gather(1, by_survival).masked_fill(~kept, MAX_DEPTH + 1)
    chosen = by_survival.gather(1, depths.sort(dim=1, stable=True).indices)[:, :width]
    valid = kept[:, :width]
    tree = DraftTree(
        tokens=candidates.tokens.gather(1, chosen) * valid,
        parents=_renumbered(candidates.parents, chosen).masked_fill(~valid, ROOT),
        depths=candidates.depths.gather(1, chosen) * valid,
        survival=candidates.survival.gather(1, chosen) * valid,
        num_nodes=num_nodes,
    )
    return tree, chosen


def ancestor_matrix(parents: Tensor) -> Tensor:
    """Compute the ancestor matrix: true at (b, i, j) if node j is on the path from the root to node i, i included.
    # parents [batch, nodes] -> [batch, nodes, nodes] bool"""
    batch, nodes = parents.shape
    if nodes == 0:
        return parents.new_zeros(batch, 0, 0, dtype=torch.bool)
    root = torch.full((batch, 1), nodes, dtype=parents.dtype, device=parents.device)
    # The root becomes the last row, its own parent and no node's ancestor, so that every jump is defined.
    jump = torch.cat([torch.where(parents < 0, nodes, parents), root], dim=1)  # [batch, nodes + 1]
    above = torch.eye(nodes + 1, nodes, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    for _ in range(_doublings(nodes)):
        above = above | above.gather(1, jump[:, :, None].expand(-1, -1, nodes))
        jump = jump.gather(1, jump)
    return above[:, :nodes]


def falling(candidates: DraftTree) -> torch.return_types.sort:
    """Sort survival, highest first, with node indices; the survival of padding is -1. # -> both [batch, nodes]"""
    return candidates.survival.masked_fill(~candidates.valid, -1.0).sort(dim=1, descending=True, stable=True)


def accumulated(values: Tensor, parents: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Reduce values by `combine` over the path from the root's child to each node.
    # values [batch, nodes + 1], with the neutral element in the last column; parents [batch, nodes] -> like parents"""
    nodes = parents.shape[1]
    jump = pad(torch.where(parents < 0, nodes, parents), (0, 1), value=nodes)  # the root is its own parent
    for _ in range(_doublings(nodes)):
        values, jump = combine(values, values.gather(1, jump)), jump.gather(1, jump)
    return values[:, :nodes]


def _doublings(nodes: int) -> int:
    """Compute how many pointer doublings reach the root from any node of a tree of `nodes` nodes."""
    return max(0, min(nodes, MAX_DEPTH) - 1).bit_length()


def path_hashes(tokens: Tensor, parents: Tensor, depths: Tensor) -> Tensor:
    """Hash each node's path: sum of (token + 1) * odd random factor of the depth, modulo 2^64. Different paths collide
    with probability 2^-64; a collision would only draft a wrong token. # -> [batch, nodes] int64"""
    return accumulated(pad((tokens + 1) * _factors(tokens.device)[depths], (0, 1)), parents, torch.add)


@cache
def _factors(device: torch.device) -> Tensor:
    """Draw the odd random factor of each depth. # -> [MAX_DEPTH + 1] int64"""
    generator = torch.Generator().manual_seed(2)
    return (torch.randint(-(2**62), 2**62, (MAX_DEPTH + 1,), generator=generator) | 1).to(device)


def _first_with_equal_hash(hashes: Tensor, order: Tensor) -> Tensor:
    """Find for each node the first node in `order` with the same path. # both [batch, nodes] -> [batch, nodes] int64"""
    ordered = hashes.gather(1, order)
    grouped = ordered.sort(dim=1, stable=True)  # equal hashes adjacent, likeliest first
    begins = pad(grouped.values[:, 1:] != grouped.values[:, :-1], (1, 0), value=True)
    places = torch.arange(hashes.shape[1], device=hashes.device).expand_as(hashes)
    head = torch.where(begins, places, 0).cummax(1).values  # index at which a member's group begins
    leaders = order.gather(1, grouped.indices.gather(1, head))
    members = order.gather(1, grouped.indices)
    return torch.empty_like(members).scatter_(1, members, leaders)


def _renumbered(parents: Tensor, chosen: Tensor) -> Tensor:
    """Renumber the parents of the chosen nodes. # parents [batch, nodes], chosen [batch, width] -> like chosen"""
    places = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    numbers = parents.new_full((parents.shape[0], parents.shape[1] + 1), ROOT)  # old + 1 -> new
    numbers.scatter_(1, chosen + 1, places)
    return numbers.gather(1, parents.gather(1, chosen) + 1)
