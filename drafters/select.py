"""Which candidates are verified: the likeliest nodes of each sequence, as a tree again.

Survival never rises along a path and parents stand before children, so a stable sort by falling survival puts
every parent before its children and any prefix of that order is a valid tree.
"""

import torch
from torch import Tensor

from drafters.tree import ROOT, Candidates, DraftTree


def select_nodes(candidates: Candidates, num_keep: Tensor, width: int) -> tuple[DraftTree, Tensor]:
    """The tree of each sequence's likeliest nodes by depth, then survival, and which candidates these were; those of
    padding mean nothing.

    num_keep [batch], at most `width`, to which the result is padded -> tree, [batch, width] int64
    """
    width = min(width, candidates.width)
    if width == 0:
        tree = DraftTree.empty(candidates.batch, candidates.tokens.device)
        return tree, tree.parents
    num_nodes = torch.minimum(num_keep, candidates.num_nodes)
    order = _topological(candidates, num_nodes)  # [batch, nodes]
    kept = order[:, :width]
    valid = torch.arange(width, device=order.device) < num_nodes[:, None]
    tree = DraftTree(
        tokens=candidates.tokens.gather(1, kept) * valid,
        parents=torch.where(valid, _renumbered_parents(candidates.parents, order, kept), ROOT),
        depths=candidates.depths.gather(1, kept) * valid,
        survival=candidates.survival.gather(1, kept) * valid,
        num_nodes=num_nodes,
    )
    return tree, kept


def survival_order(candidates: Candidates, limits: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """All sequences' candidates sorted together, likeliest first, at most limits[b] of sequence b.

    limits [batch] -> survival [batch * nodes] float32, owner sequence [batch * nodes] int64; the entries beyond
    those that exist have survival 0 and owner -1. With weights [batch], what one token of each sequence counts,
    survival is multiplied by them.
    """
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


def _topological(candidates: Candidates, num_nodes: Tensor) -> Tensor:
    by_survival = _falling(candidates).indices
    ranks = torch.arange(by_survival.shape[1], device=by_survival.device)
    last = torch.iinfo(candidates.depths.dtype).max
    depths = candidates.depths.gather(1, by_survival).masked_fill(ranks >= num_nodes[:, None], last)
    return by_survival.gather(1, depths.sort(dim=1, stable=True).indices)


def _renumbered_parents(parents: Tensor, order: Tensor, kept: Tensor) -> Tensor:
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    new_index = torch.empty_like(order).scatter_(1, order, places)  # [batch, nodes], old -> new
    old_parents = parents.gather(1, kept)
    return torch.where(old_parents < 0, ROOT, new_index.gather(1, old_parents.clamp(min=0)))
