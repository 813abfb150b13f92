"""Estimates how likely draft nodes are to be accepted, and prunes trees by it: hit rates counted from verified nodes,
survival corrected by these rates, and the trees with the most expected tokens per second.

*Survival* of a node is the estimated probability that it is on the accepted path; *conditional* is its survival given
that its parent is accepted. Legend: batch, nodes as in kernels/trees.py; buckets = classes of evidence, each of which
has a hit rate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.trees import DraftTree, Fates, accumulated, falling, fates, select_nodes

Walk = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Fates]
"""Signature of `fates`."""

CEILING = 0.98  # largest conditional; below 1, because survival must fall strictly along a path
DEPTHS = 8  # number of depth classes; deeper nodes belong to the last one
CLAIMS = 9
"""Bins of the claimed conditional: eight of equal width, and one for certainty (by a grammar or a replayed prefix)."""


@dataclass(frozen=True, slots=True)
class HitCounts:
    """Hit rates by bucket, 1 at first, and the counts they follow from; tensors are [buckets] float32. The ops change
    them in place, because captured graphs read their addresses."""

    came_true: Tensor
    expected: Tensor
    rates: Tensor  # clamped (prior + came true) / (prior + expected)
    prior: float  # labels that a rate of 1 counts as
    decay: float  # factor on all older counts whenever labels are added
    low: float  # bounds of the rates
    high: float

    @staticmethod
    def empty(
        buckets: int, *, prior: float, decay: float, limits: tuple[float, float], device: torch.device | str
    ) -> "HitCounts":
        """Build counts without labels."""
        came_true, expected = torch.zeros(2, buckets, device=device)
        return HitCounts(came_true, expected, torch.ones_like(expected), prior, decay, *limits)

    def fade(self, share: float) -> None:
        """Multiply the weight of all labels so far by `share`."""
        for counted in (self.came_true, self.expected):
            counted.mul_(share)
        self.estimate()

    def estimate(self) -> None:
        """Update `rates` from the counts."""
        hits = (self.prior + self.came_true).div_(self.prior + self.expected)
        torch.clamp(hits, self.low, self.high, out=self.rates)


def count_hits(counts: HitCounts, buckets: Tensor, came_true: Tensor, expected: Tensor) -> None:
    """Add outcomes and their expected values to their buckets, and update the rates; both values are 0 for no label.
    # buckets [...] int64; came_true, expected [...] bool or float32"""
    flat = buckets.flatten()
    counts.came_true.mul_(counts.decay).index_add_(0, flat, came_true.float().flatten())
    counts.expected.mul_(counts.decay).index_add_(0, flat, expected.float().flatten())
    counts.estimate()


class Proposed(NamedTuple):
    """The newest tree of each row of the engine's table, kept until its outcome is known; all tensors [rows, nodes]."""

    tokens: Tensor  # int64
    parents: Tensor  # int64
    depths: Tensor  # int64, 0 = padding
    predicted: Tensor  # float32, conditional probability
    buckets: Tensor  # int64


def keep_proposed(
    log: Proposed, rows: Tensor, tree: DraftTree, chosen: Tensor, predicted: Tensor, buckets: Tensor
) -> None:
    """Store the trees of these rows; `chosen` are the indices of their nodes among all predicted nodes.
    # rows [batch]; chosen [batch, nodes of the tree] int64; predicted [batch, all nodes] float32; buckets [all nodes]
    """
    values = tree.tokens, tree.parents, tree.depths, predicted.gather(1, chosen), buckets[chosen]
    for table, value in zip(log, values, strict=True):
        table[:, : value.shape[1]].index_copy_(0, rows, value)
    log.depths[:, tree.width :].index_fill_(0, rows, 0)


def judge_proposed(
    log: Proposed,
    counts: HitCounts,
    rows: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    next_block: int,
    *,
    walk: Walk = fates,
) -> Tensor:
    """Count the outcome of these rows' stored nodes against their predicted probabilities, and clear the rows. Returns
    the number of accepted nodes in buckets from `next_block` on, and the number of committed tokens.
    # rows, lengths [batch]; tokens [batch, longest] int64, committed after the root -> [2] int64"""
    proposed = Proposed(*(table.index_select(0, rows) for table in log))
    tried, true = walk(proposed.tokens, proposed.parents, proposed.depths, tokens, lengths)
    count_hits(counts, proposed.buckets, true & tried, proposed.predicted * tried)
    accepted = true & (proposed.buckets >= next_block) & (proposed.depths < lengths[:, None])
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
    *,
    walk: Walk = fates,
) -> None:
    """Count the outcome of verified nodes. In `counts`: which tried claims came true. In `bins`, by survival, after
    multiplying them by `bin_decay`: the number of nodes, the sum of their survival, and the number accepted.
    # bins [3, bins] float32; claimed [batch, nodes] float32; buckets [batch, nodes] int64; committed [batch, longest],
    num_known [batch]: the last two arguments of `fates`"""
    tried, accepted = walk(trees.tokens, trees.parents, trees.depths, committed, num_known)
    count_hits(counts, buckets, accepted, claimed * tried)
    place = (trees.survival * bins.shape[1]).long().clamp(0, bins.shape[1] - 1).flatten()
    values = torch.stack([trees.depths > 0, trees.survival, accepted]).view(3, -1)
    bins.mul_(bin_decay).index_add_(1, place, values)


class Corrected(NamedTuple):
    """Corrected survival of candidates, and the claims that it follows from; all tensors [batch, nodes]."""

    survival: Tensor  # float32
    conditional: Tensor  # float32, as claimed, before the correction
    buckets: Tensor  # int64, bucket of depth and claim


def correct_survival(candidates: DraftTree, deepest: Tensor, rates: Tensor) -> Corrected:
    """Correct survival: survival_i = product over the path to i of min(CEILING, conditional * rates[bucket of depth and
    claim]). Nodes of survival 0 and nodes deeper than `deepest` get 0; survival falls along every path.
    # deepest [batch] int64; rates [DEPTHS * CLAIMS] -> [batch, nodes]"""
    claimed = candidates.survival * (candidates.depths <= deepest[:, None])
    above = pad(claimed, (1, 0), value=1.0).gather(1, candidates.parents + 1)
    conditional = (claimed / above.clamp(min=1e-9)).clamp(max=1.0)
    claim = (conditional * (CLAIMS - 1)).long().clamp(0, CLAIMS - 1)  # NaN counts as a claim of 0
    buckets = (candidates.depths - 1).clamp(0, DEPTHS - 1) * CLAIMS + claim
    corrected = (conditional * rates[buckets]).clamp(max=CEILING)
    survival = accumulated(pad(corrected, (0, 1), value=1.0), candidates.parents, torch.mul)
    return Corrected(survival, conditional, buckets)


SIZES = 3
"""Number of values per tree in `Pruned.sizes`."""


class Pruned(NamedTuple):
    """The trees of a step, with the claims and buckets by which `count_claims` counts their outcome; values of padding
    are undefined."""

    trees: DraftTree  # [batch, width]
    claimed: Tensor  # [batch, width] float32, `Corrected.conditional` of their nodes
    buckets: Tensor  # [batch, width] int64
    sizes: Tensor  # [batch, SIZES] int64: nodes wanted, nodes kept, candidates of survival above 0


def prune_trees(
    candidates: DraftTree,
    deepest: Tensor,
    max_nodes: Tensor,
    rates: Tensor,
    seconds: Tensor,
    weights: Tensor,
    width: int,
    widths: Tensor | None = None,
    *,
    correct: Callable[[DraftTree, Tensor, Tensor], Corrected] = correct_survival,
) -> Pruned:
    """Prune candidates to the trees with the most expected tokens per second, of at most `width` nodes each. Corrects
    survival by `correct_survival`; `allocate_nodes` decides how many nodes each sequence gets. With `widths` (rows are
    laid out before the trees are known), `allocate_width` decides how many nodes are wanted, and trees keep all that
    fit.

    candidates [batch, nodes]; deepest [batch] and rates as in `correct_survival`; max_nodes [batch] int64, most nodes
    of each tree, below 0 for a padding row; seconds [choices] float32, duration of each step to choose from, or empty
    to give each sequence its `max_nodes`; weights [batch] float32, value of one token of each sequence
    -> [batch, width].
    """
    survival, claimed, buckets = correct(candidates, deepest, rates)
    num_alive = (survival > 0).sum(1)
    max_nodes = torch.minimum(max_nodes, num_alive)
    candidates = candidates._replace(survival=survival)
    if not seconds.shape[0]:
        wanted = max_nodes.clamp(min=0)
    elif widths is None:
        wanted = allocate_nodes(candidates, max_nodes, seconds, weights)
    else:
        wanted = allocate_width(candidates, max_nodes, seconds, weights, widths)
    kept = wanted if widths is None else max_nodes
    trees, chosen = select_nodes(candidates, kept.clamp(0, width), width)
    sizes = torch.stack([wanted, trees.num_nodes, num_alive], dim=1)
    return Pruned(trees, claimed.gather(1, chosen), buckets.gather(1, chosen), sizes)


def allocate_nodes(candidates: DraftTree, max_nodes: Tensor, seconds: Tensor, weights: Tensor) -> Tensor:
    """Allocate nodes to sequences for the most expected tokens per second: the n that maximises
    (sum of weights + sum of the n largest survival * weight) / seconds[n]. # -> [batch] int64

    max_nodes [batch] int64, most nodes of each sequence, below 0 for a padding row; seconds [batch * nodes + 1]
    float32, duration of a step with 0, 1, ... nodes, infinite for more than fit; weights [batch] float32, value of one
    token of each sequence.
    """
    values, owners = survival_order(candidates, max_nodes, weights)
    is_sequence = max_nodes >= 0
    expected = (weights * is_sequence).sum() + torch.cat([values.new_zeros(1), values.cumsum(0)])
    best = (expected / seconds).argmax()
    if candidates.batch > 1:
        owners = torch.where(best > is_sequence.sum(), _best_of_each_first(owners, candidates.batch), owners)
    is_chosen = (torch.arange(owners.shape[0], device=owners.device) < best) & (owners >= 0)
    return torch.zeros_like(max_nodes).scatter_add_(0, owners.clamp(min=0), is_chosen.to(max_nodes.dtype))


def survival_order(candidates: DraftTree, max_nodes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sort all sequences' candidates together by survival * weight, highest first, at most max_nodes[b] of sequence b.
    # max_nodes, weights [batch] -> values [batch * nodes] float32, 0 padded; owner sequence [batch * nodes] int64, -1
    padded"""
    nodes = candidates.tokens.shape[1]
    survival = falling(candidates).values * weights[:, None]  # [batch, nodes]
    ranks = torch.arange(nodes, device=survival.device)
    allowed = ranks < torch.minimum(max_nodes, candidates.num_nodes)[:, None]
    together = survival.masked_fill(~allowed, -1.0).flatten().sort(descending=True, stable=True)
    exists = together.values >= 0
    owners = torch.where(exists, together.indices // max(nodes, 1), -1)
    return together.values * exists, owners


def _best_of_each_first(owners: Tensor, batch: int) -> Tensor:
    """Reorder nodes so that each sequence's best node comes before all others: a sequence that is slightly less certain
    than the rest still gets a tree. # owners [nodes] int64, -1 padded at the end -> [nodes]"""
    places = torch.arange(owners.shape[0], device=owners.device)
    lines = torch.where(owners < 0, batch, owners)
    first = places.new_full((batch + 1,), owners.shape[0]).scatter_reduce_(0, lines, places, "amin")
    is_best = (first[lines] == places) & (owners >= 0)
    return owners[torch.where(is_best, places - owners.shape[0], places).argsort(stable=True)]


def allocate_width(
    candidates: DraftTree, max_nodes: Tensor, seconds: Tensor, weights: Tensor, widths: Tensor
) -> Tensor:
    """Allocate nodes to sequences if all trees get the same number of rows: each gets up to the width with the most
    expected tokens per second. # -> [batch] int64

    widths [choices] int64, numbers of rows per tree to choose from; seconds [choices] float32, duration of a step of
    that width, infinite for more than fit; max_nodes, weights [batch] as in `allocate_nodes`.
    """
    survival = falling(candidates).values * weights[:, None]  # [batch, nodes]
    ranks = torch.arange(candidates.width, device=widths.device)
    counted = survival * (ranks < torch.minimum(max_nodes, candidates.num_nodes)[:, None])
    totals = torch.cat([counted.new_zeros(len(counted), 1), counted.cumsum(1)], 1)  # [batch, nodes + 1]
    expected = (weights * (max_nodes >= 0)).sum() + totals[:, widths.clamp(max=candidates.width)].sum(0)
    best = (expected / seconds).argmax(keepdim=True)
    return torch.minimum(max_nodes, widths.gather(0, best)).clamp(min=0)
