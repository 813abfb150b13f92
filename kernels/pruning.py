"""From a drafter's candidates to the trees that are verified: survival corrected, nodes shared out among the sequences
of a batch, the likeliest kept.
Legend: batch, nodes as in kernels/trees.py."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.hit_rates import Corrected, correct_survival
from kernels.trees import DraftTree, falling, select_nodes

SIZES = 3
"""Numbers of a tree in `Pruned`."""


class Pruned(NamedTuple):
    """The trees of a step, and what is to be known of them later; what is claimed of padding means nothing."""

    trees: DraftTree  # [batch, width]
    claimed: Tensor  # [batch, width] float32, of their nodes before correction: `Corrected.conditional`
    buckets: Tensor  # [batch, width] int64
    sizes: Tensor  # [batch, SIZES] int64: nodes wanted, nodes kept, candidates that have a chance


def prune_trees(
    candidates: DraftTree,
    deepest: Tensor,
    wished: Tensor,
    rates: Tensor,
    seconds: Tensor,
    weights: Tensor,
    width: int,
    widths: Tensor | None = None,
) -> Pruned:
    """The trees of most expected tokens per second, of at most `width` nodes each: with survival as of
    `correct_survival`, as many nodes as `allocate_nodes` says. With `widths`, where rows are laid out before, the nodes
    wanted are those of `allocate_width`, and all are kept that fit.

    deepest, rates as of `correct_survival`; wished [batch] int64, most nodes of each tree, below 0 for a line that is
    no sequence; seconds [choices] float32 of the steps to choose among, none where all that are wished for are wanted;
    weights [batch] float32, what one token of each sequence counts.
    """
    return prune_with(correct_survival, candidates, deepest, wished, rates, seconds, weights, width, widths)


def prune_with(
    correct: Callable[[DraftTree, Tensor, Tensor], Corrected],
    candidates: DraftTree,
    deepest: Tensor,
    wished: Tensor,
    rates: Tensor,
    seconds: Tensor,
    weights: Tensor,
    width: int,
    widths: Tensor | None = None,
) -> Pruned:
    """`prune_trees`, with this implementation of `correct_survival`."""
    survival, claimed, buckets = correct(candidates, deepest, rates)
    worth = (survival > 0).sum(1)
    limits = torch.minimum(wished, worth)
    candidates = candidates._replace(survival=survival)
    if not seconds.shape[0]:
        wanted = limits.clamp(min=0)
    elif widths is None:
        wanted = allocate_nodes(candidates, limits, seconds, weights)
    else:
        wanted = allocate_width(candidates, limits, seconds, weights, widths)
    kept = wanted if widths is None else limits
    trees, chosen = select_nodes(candidates, kept.clamp(0, width), width)
    sizes = torch.stack([wanted, trees.num_nodes, worth], dim=1)
    return Pruned(trees, claimed.gather(1, chosen), buckets.gather(1, chosen), sizes)


def allocate_nodes(candidates: DraftTree, limits: Tensor, seconds: Tensor, weights: Tensor) -> Tensor:
    """Nodes per sequence for the most expected tokens per second. # -> [batch] int64

    limits [batch] int64, at most so many of each, below 0 for a line that is no sequence; seconds
    [batch * nodes + 1] float32 of a step with 0, 1, ... nodes, infinite for more than there is room for; weights
    [batch] float32, what one token of each counts.
    """
    worth, owners = survival_order(candidates, limits, weights)
    is_sequence = limits >= 0
    expected = (weights * is_sequence).sum() + torch.cat([worth.new_zeros(1), worth.cumsum(0)])
    best = (expected / seconds).argmax()
    if candidates.batch > 1:
        owners = torch.where(best > is_sequence.sum(), _best_of_each_first(owners, candidates.batch), owners)
    is_chosen = (torch.arange(owners.shape[0], device=owners.device) < best) & (owners >= 0)
    return torch.zeros_like(limits).scatter_add_(0, owners.clamp(min=0), is_chosen.to(limits.dtype))


def survival_order(candidates: DraftTree, limits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """All sequences' candidates sorted together, likeliest first, at most limits[b] of sequence b; survival is
    multiplied by weights, what one token of each sequence counts. # limits, weights [batch]
    -> survival [batch * nodes] float32, owner sequence [batch * nodes] int64; 0 and -1 beyond those that exist"""
    nodes = candidates.tokens.shape[1]
    survival = falling(candidates).values * weights[:, None]  # [batch, nodes]
    ranks = torch.arange(nodes, device=survival.device)
    allowed = ranks < torch.minimum(limits, candidates.num_nodes)[:, None]
    together = survival.masked_fill(~allowed, -1.0).flatten().sort(descending=True, stable=True)
    exists = together.values >= 0
    owners = torch.where(exists, together.indices // max(nodes, 1), -1)
    return together.values * exists, owners


def _best_of_each_first(owners: Tensor, batch: int) -> Tensor:
    """The order again, but each sequence's best node before anybody's second: nobody goes without a tree for being a
    little less sure than all others. # owners [nodes] int64, -1 padded at the end -> [nodes]"""
    places = torch.arange(owners.shape[0], device=owners.device)
    lines = torch.where(owners < 0, batch, owners)
    first = places.new_full((batch + 1,), owners.shape[0]).scatter_reduce_(0, lines, places, "amin")
    is_best = (first[lines] == places) & (owners >= 0)
    return owners[torch.where(is_best, places - owners.shape[0], places).argsort(stable=True)]


def allocate_width(candidates: DraftTree, limits: Tensor, seconds: Tensor, weights: Tensor, widths: Tensor) -> Tensor:
    """Nodes per sequence where the rows of all trees are laid out for the same number of nodes: those of the width with
    the most expected tokens per second. # -> [batch] int64

    seconds [choices] float32 of a step whose trees have rows for `widths` [choices] int64 nodes each, infinite for more
    than there is room for; the others as of `allocate_nodes`.
    """
    survival = falling(candidates).values * weights[:, None]  # [batch, nodes]
    ranks = torch.arange(candidates.width, device=widths.device)
    counted = survival * (ranks < torch.minimum(limits, candidates.num_nodes)[:, None])
    totals = torch.cat([counted.new_zeros(len(counted), 1), counted.cumsum(1)], 1)  # [batch, nodes + 1]
    expected = (weights * (limits >= 0)).sum() + totals[:, widths.clamp(max=candidates.width)].sum(0)
    best = (expected / seconds).argmax(keepdim=True)
    return torch.minimum(limits, widths.gather(0, best)).clamp(min=0)
