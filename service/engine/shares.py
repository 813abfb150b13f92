"""How many nodes each sequence verifies for the most expected tokens per second of the whole batch: tensors only.

With candidates of all sequences sorted by survival, S(N) the sum of the first N and W what the sequences' certain
tokens count,

    N* = argmax_N (W + S(N)) / seconds(N)
"""

import torch
from torch import Tensor

from drafters.select import survival_order
from drafters.tree import Candidates


def allocate_nodes(candidates: Candidates, limits: Tensor, seconds: Tensor, weights: Tensor) -> Tensor:
    """Nodes per sequence. # -> [batch] int64

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


def _best_of_each_first(owners: Tensor, batch: int) -> Tensor:
    """The order again, but each sequence's best node before anybody's second: nobody goes without a tree for being a
    little less sure than all others. # owners [nodes] int64, -1 padded at the end -> [nodes]"""
    places = torch.arange(owners.shape[0], device=owners.device)
    lines = torch.where(owners < 0, batch, owners)
    first = places.new_full((batch + 1,), owners.shape[0]).scatter_reduce_(0, lines, places, "amin")
    is_best = (first[lines] == places) & (owners >= 0)
    return owners[torch.where(is_best, places - owners.shape[0], places).argsort(stable=True)]
