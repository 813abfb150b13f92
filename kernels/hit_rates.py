"""How often proposals come true, counted by bucket, and survival corrected by it.
Legend: batch, nodes as in kernels/trees.py; buckets = kinds of evidence; conditional = survival given that the parent
survives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.trees import DraftTree, Fates, accumulated, fates

Walk = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Fates]
"""As `fates`."""

CEILING = 0.98  # below 1: survival must fall strictly along a path
DEPTHS = 8  # deeper nodes count as of this depth
CLAIMS = 9
"""Bins of the claimed conditional: eighths, and what is certain, since a grammar forces it or it was said before."""


@dataclass(frozen=True, slots=True)
class HitCounts:
    """Labels by bucket; all [buckets] float32, changed in place: captured computations read them where they stand."""

    prior_true: Tensor
    prior_expected: Tensor
    came_true: Tensor
    expected: Tensor
    rates: Tensor  # (prior + came true) / (prior + expected), within limits
    decay: float  # what labels weigh after each later call of `count_hits`
    low: float
    high: float

    def estimate(self) -> None:
        """Rates of what has been counted."""
        hits = (self.prior_true + self.came_true).div_(self.prior_expected + self.expected)
        torch.clamp(hits, self.low, self.high, out=self.rates)


def count_hits(counts: HitCounts, buckets: Tensor, came_true: Tensor, expected: Tensor) -> None:
    """Count labels; both are 0 where there is none. # all three [...], came_true and expected bool or float32"""
    flat = buckets.flatten()
    counts.came_true.mul_(counts.decay).index_add_(0, flat, came_true.float().flatten())
    counts.expected.mul_(counts.decay).index_add_(0, flat, expected.float().flatten())
    counts.estimate()


class Proposed(NamedTuple):
    """The newest tree of each row of the engine's table, until the text says what became of it; all [rows, nodes]."""

    tokens: Tensor  # int64
    parents: Tensor  # int64
    depths: Tensor  # int64, 0 = padding
    predicted: Tensor  # float32, conditional probability
    buckets: Tensor  # int64


def keep_proposed(
    log: Proposed, rows: Tensor, tree: DraftTree, chosen: Tensor, predicted: Tensor, buckets: Tensor
) -> None:
    """These rows propose a tree now, whose nodes were `chosen` among those that were predicted.
    # rows [batch]; chosen [batch, nodes of the tree] int64; predicted [batch, all nodes] float32; buckets [all nodes]
    """
    values = tree.tokens, tree.parents, tree.depths, predicted.gather(1, chosen), buckets[chosen]
    for table, value in zip(log, values, strict=True):
        table[:, : value.shape[1]].index_copy_(0, rows, value)
    log.depths[:, tree.width :].index_fill_(0, rows, 0)


def judge_proposed(
    log: Proposed, counts: HitCounts, rows: Tensor, tokens: Tensor, lengths: Tensor, further: int
) -> Tensor:
    """Count what the text made of the nodes that these rows proposed, which are forgotten, each with its predicted
    probability; says how many nodes of buckets from `further` on were accepted, and how many tokens were committed.
    # rows, lengths [batch]; tokens [batch, longest] int64, the text behind the root -> [2] int64"""
    return judge_with(fates, log, counts, rows, tokens, lengths, further)


def judge_with(
    walk: Walk,
    log: Proposed,
    counts: HitCounts,
    rows: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    further: int,
) -> Tensor:
    """`judge_proposed`, with this implementation of `fates`."""
    proposed = Proposed(*(table.index_select(0, rows) for table in log))
    tried, true = walk(proposed.tokens, proposed.parents, proposed.depths, tokens, lengths)
    count_hits(counts, proposed.buckets, true & tried, proposed.predicted * tried)
    accepted = true & (proposed.buckets >= further) & (proposed.depths < lengths[:, None])
    log.depths.index_fill_(0, rows, 0)
    return torch.stack([accepted.sum(), lengths.sum()])


def count_claims(
    counts: HitCounts,
    bins: Tensor,
    bin_decay: float,
    trees: DraftTree,
    claimed: Tensor,
    buckets: Tensor,
    committed: Tensor,
    num_known: Tensor,
) -> None:
    """Count what became of verified nodes: in `counts` which claims came true of those that were tried, and in `bins`
    [3, bins] float32, by survival, nodes, their survival and how many were accepted; what they hold weighs `bin_decay`
    times less first. # claimed [batch, nodes] float32, buckets int64; committed, num_known as `fates`' last two"""
    count_with(fates, counts, bins, bin_decay, trees, claimed, buckets, committed, num_known)


def count_with(
    walk: Walk,
    counts: HitCounts,
    bins: Tensor,
    bin_decay: float,
    trees: DraftTree,
    claimed: Tensor,
    buckets: Tensor,
    committed: Tensor,
    num_known: Tensor,
) -> None:
    """`count_claims`, with this implementation of `fates`."""
    tried, accepted = walk(trees.tokens, trees.parents, trees.depths, committed, num_known)
    count_hits(counts, buckets, accepted, claimed * tried)
    place = (trees.survival * bins.shape[1]).long().clamp(0, bins.shape[1] - 1).flatten()
    values = torch.stack([trees.depths > 0, trees.survival, accepted]).view(3, -1)
    bins.mul_(bin_decay).index_add_(1, place, values)


class Corrected(NamedTuple):
    """What was claimed of nodes and what is made of it; all [batch, nodes]."""

    survival: Tensor  # float32
    conditional: Tensor  # float32, as claimed
    buckets: Tensor  # int64, by depth and claim


def correct_survival(candidates: DraftTree, deepest: Tensor, rates: Tensor) -> Corrected:
    """Survival as claims of its kind turned out; what had none keeps none, nodes below `deepest` get none, and it still
    falls along every path. # deepest [batch] int64; rates [DEPTHS * CLAIMS]"""
    claimed = candidates.survival * (candidates.depths <= deepest[:, None])
    above = pad(claimed, (1, 0), value=1.0).gather(1, candidates.parents + 1)
    conditional = (claimed / above.clamp(min=1e-9)).clamp(max=1.0)
    claim = (conditional * (CLAIMS - 1)).long().clamp(0, CLAIMS - 1)  # of no number a claim of 0
    buckets = (candidates.depths - 1).clamp(0, DEPTHS - 1) * CLAIMS + claim
    corrected = (conditional * rates[buckets]).clamp(max=CEILING)
    survival = accumulated(pad(corrected, (0, 1), value=1.0), candidates.parents, torch.mul)
    return Corrected(survival, conditional, buckets)
