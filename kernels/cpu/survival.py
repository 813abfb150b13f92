"""Compiled ops of `kernels.survival`."""

import torch
from torch import Tensor

from kernels.cpu.library import CStruct, call, contiguous, remembered
from kernels.cpu.trees import empty_tree, trees_of
from kernels.survival import CEILING, CLAIMS, DEPTHS, SIZES, HitCounts, Proposed, Pruned
from kernels.trees import DraftTree


def count_hits(counts: HitCounts, buckets: Tensor, came_true: Tensor, expected: Tensor) -> None:
    """As the reference. # all three [...]"""
    labels = contiguous(buckets, came_true.float(), expected.float())
    call("count_hits", _hits_of(counts), *labels, buckets.numel())


def keep_proposed(
    log: Proposed, rows: Tensor, tree: DraftTree, chosen: Tensor, predicted: Tensor, buckets: Tensor
) -> None:
    """As the reference. # chosen [batch, nodes of the tree]; predicted [batch, all nodes]"""
    rows, *values = contiguous(rows, chosen, predicted, buckets)
    call("keep_proposed", _log_of(log), rows, tree.batch, trees_of(tree), *values, buckets.numel())


def judge_proposed(
    log: Proposed, counts: HitCounts, rows: Tensor, tokens: Tensor, lengths: Tensor, next_block: int
) -> Tensor:
    """As the reference. # tokens [batch, longest] -> [2]"""
    rows, tokens, lengths = contiguous(rows, tokens, lengths)
    (batch, longest), came = tokens.shape, rows.new_empty(2)
    call("judge_proposed", _log_of(log), _hits_of(counts), rows, batch, tokens, longest, lengths, next_block, came)
    return came


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
    """As the reference. # bins [3, bins]; claimed, buckets [batch, nodes]; committed [batch, longest]"""
    assert bins.is_contiguous(), "it is changed in place"
    *values, num_known = contiguous(claimed, buckets, committed, num_known)
    counted, verified = (_hits_of(counts), bins, bins.shape[1], bin_decay), (trees_of(trees), trees.batch)
    call("count_claims", *counted, *verified, *values, committed.shape[1], num_known)


def prune_trees(
    candidates: DraftTree,
    deepest: Tensor,
    requested: Tensor,
    rates: Tensor,
    seconds: Tensor,
    weights: Tensor,
    width: int,
    widths: Tensor | None = None,
) -> Pruned:
    """As the reference. # candidates [batch, nodes] -> [batch, width]"""
    batch = candidates.batch
    kept = empty_tree(batch, min(width, candidates.width))
    claimed, buckets = torch.empty_like(kept.survival), torch.empty_like(kept.tokens)
    sizes = torch.empty(batch, SIZES, dtype=torch.int64)
    given, constants = contiguous(deepest, requested, rates), (DEPTHS, CLAIMS, CEILING)
    choices, written = (seconds, seconds.shape[0], weights, widths), (trees_of(kept), claimed, buckets, sizes)
    call("prune_trees", trees_of(candidates), batch, *given, *constants, *choices, *written)
    return Pruned(kept, claimed, buckets, sizes)


@remembered
def _hits_of(counts: HitCounts) -> CStruct:
    """`Hits` of hit_rates.cpp."""
    tables = counts.prior_true, counts.prior_expected, counts.came_true, counts.expected, counts.rates
    return CStruct(*tables, counts.rates.shape[0], floats=(counts.decay, counts.low, counts.high))


@remembered
def _log_of(log: Proposed) -> CStruct:
    """`Proposed` of hit_rates.cpp."""
    return CStruct(*log, log.tokens.shape[1])
