"""One tree from several: nodes with the same path become one, whoever proposed them.

Of nodes with equal paths the likeliest stays and takes over the others' children, so that survival still falls along
every path. Knows no drafter.
Legend: batch, nodes as in drafters/tree.py; raw = nodes before merging, parents before children, survival 0 = absent.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.tree import DOUBLINGS, MAX_DEPTH, ROOT, Candidates, DraftTree

NO_HASH = 0
"""Of what is no node: a path has it with odds of 2^-64."""


@cache
def _factors(device: torch.device) -> Tensor:
    """By depth. # -> [MAX_DEPTH + 1] int64"""
    generator = torch.Generator().manual_seed(2)
    return (torch.randint(-(2**62), 2**62, (MAX_DEPTH + 1,), generator=generator) | 1).to(device)


def path_hashes(tokens: Tensor, parents: Tensor, depths: Tensor) -> Tensor:
    """A 64-bit sum over the path of tokens times random odd numbers by depth; equal paths have equal sums.

    Different paths collide with odds of about 2^-64, and would only draft a wrong token. # -> [batch, nodes] int64
    """
    own = (tokens + 1) * _factors(tokens.device)[depths]
    # The root becomes the last column: it adds nothing and is its own parent.
    nodes = tokens.shape[1]
    sums, jump = pad(own, (0, 1)), pad(torch.where(parents < 0, nodes, parents), (0, 1), value=nodes)
    for _ in range(DOUBLINGS):
        sums, jump = sums + sums.gather(1, jump), jump.gather(1, jump)
    return sums[:, :nodes]


def node_hashes(tree: Candidates) -> Tensor:
    """`path_hashes` of a tree's nodes, NO_HASH for its padding. # -> [batch, nodes] int64"""
    return path_hashes(tree.tokens, tree.parents, tree.depths).masked_fill(~tree.valid, NO_HASH)


def prefix_hashes(tokens: Tensor) -> Tensor:
    """The same sums for the beginnings of a text after the root, as far as trees reach.

    tokens [batch, count] -> [batch, at most MAX_DEPTH] int64
    """
    tokens = tokens[:, :MAX_DEPTH]
    factors = _factors(tokens.device)[1 : tokens.shape[1] + 1]
    return ((tokens + 1) * factors).cumsum(1)


def came_true(hashes: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    """Which nodes lie on the committed text. # hashes [batch, nodes], tokens [batch, depth], counts [batch] -> bool"""
    wanted = prefix_hashes(tokens)
    known = torch.arange(wanted.shape[1], device=tokens.device) < counts[:, None]
    return ((hashes[:, :, None] == wanted[:, None]) & known[:, None]).any(2)


def joined(trees: Sequence[Candidates]) -> Candidates:
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


def merge(raw: Candidates, max_nodes: int) -> tuple[Candidates, Tensor]:
    """The likeliest nodes of a raw tree, each path once, by falling survival, and which raw nodes they were.

    `raw.num_nodes` is not read: a node exists when its survival is above 0. # -> tree, [batch, nodes] int64
    """
    hashes = path_hashes(raw.tokens, raw.parents, raw.depths)
    order = raw.survival.sort(dim=1, descending=True, stable=True).indices  # likeliest first
    representative = _first_with_equal_hash(hashes, order)
    is_kept = (representative == torch.arange(raw.width, device=order.device)) & (raw.survival > 0)
    kept_survival = raw.survival * is_kept
    best = kept_survival.sort(dim=1, descending=True, stable=True)
    survival, chosen = best.values[:, :max_nodes], best.indices[:, :max_nodes]
    exists = survival > 0
    tree = DraftTree(
        tokens=raw.tokens.gather(1, chosen) * exists,
        parents=_renumbered(raw.parents, representative, chosen).masked_fill(~exists, ROOT),
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


def _renumbered(parents: Tensor, representative: Tensor, chosen: Tensor) -> Tensor:
    """Parents of the chosen nodes in the new numbers. # -> [batch, chosen]"""
    places = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    numbers = torch.full_like(parents, ROOT).scatter_(1, chosen, places)  # old -> new
    old = parents.gather(1, chosen)
    leader = representative.gather(1, old.clamp(min=0))
    return torch.where(old < 0, ROOT, numbers.gather(1, leader))
