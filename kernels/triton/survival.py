# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""Survival corrected as in `kernels/survival.py`, in one launch: a program has a tree, a lane a node, which multiplies
what became of the claims on its path."""

from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from kernels import survival as reference
from kernels.survival import CEILING, CLAIMS, DEPTHS, Corrected
from kernels.tree_attention import MAX_DEPTH
from kernels.trees import DraftTree
from kernels.triton.trees import fates, lanes

_CEILING, _CLAIMS, _DEPTHS = tl.constexpr(CEILING), tl.constexpr(CLAIMS), tl.constexpr(DEPTHS)


judge_proposed = partial(reference.judge_proposed, walk=fates)
count_claims = partial(reference.count_claims, walk=fates)


def correct_survival(candidates: DraftTree, deepest: Tensor, rates: Tensor) -> Corrected:
    """As the reference. # candidates [batch, nodes]; deepest [batch]; rates [DEPTHS * CLAIMS] -> [batch, nodes]"""
    batch, nodes = candidates.tokens.shape
    survival = candidates.survival.new_empty(batch, nodes)
    conditional, buckets = survival.new_empty(batch, nodes), candidates.tokens.new_empty(batch, nodes)
    if batch and nodes:
        trees = (part.contiguous() for part in (candidates.parents, candidates.depths, candidates.survival))
        _correct[(batch,)](
            *trees, deepest, rates, survival, conditional, buckets, nodes,
            MOST=MAX_DEPTH, NODES=lanes(nodes), enable_fp_fusion=True,
        )  # fmt: skip
    return Corrected(survival, conditional, buckets)


@triton.jit(do_not_specialize=["nodes"])
def _correct(
    parents: tl.tensor,
    depths: tl.tensor,
    claims: tl.tensor,
    deepest: tl.tensor,
    rates: tl.tensor,
    survival: tl.tensor,
    conditional: tl.tensor,
    buckets: tl.tensor,
    nodes: tl.tensor,
    MOST: tl.constexpr,
    NODES: tl.constexpr,
) -> None:
    line, node = tl.program_id(0).to(tl.int64), tl.arange(0, NODES).to(tl.int64)
    exists, most = node < nodes, tl.load(deepest + line)
    parents, depths, claims = parents + line * nodes, depths + line * nodes, claims + line * nodes
    claim, bucket, product, above = _corrected(parents, depths, claims, rates, node, exists, most)
    at = line * nodes + node
    tl.store(conditional + at, claim, mask=exists)
    tl.store(buckets + at, bucket, mask=exists)
    level = 0
    while (tl.max(above, 0) >= 0) & (level < MOST):
        _, _, factor, higher = _corrected(parents, depths, claims, rates, above, above >= 0, most)
        product *= tl.where(above >= 0, factor, 1.0)
        above = higher
        level += 1
    tl.store(survival + at, product, mask=exists)


@triton.jit
def _corrected(
    parents: tl.tensor,
    depths: tl.tensor,
    claims: tl.tensor,
    rates: tl.tensor,
    node: tl.tensor,
    active: tl.tensor,
    most: tl.tensor,
) -> tl.tuple:
    """A node's claimed conditional, its bucket, the corrected conditional, and the node's parent."""
    above = tl.load(parents + node, mask=active, other=-1)
    depth = tl.load(depths + node, mask=active, other=0)
    claimed = tl.where(depth <= most, tl.load(claims + node, mask=active, other=0.0), 0.0)
    has_parent = above >= 0
    before = tl.load(claims + above, mask=has_parent, other=1.0)
    before = tl.where(has_parent & (tl.load(depths + above, mask=has_parent, other=0) > most), 0.0, before)
    claim = tl.minimum(tl.div_rn(claimed, tl.maximum(before, 1e-9)), 1.0)
    step = tl.minimum(tl.maximum((claim * (_CLAIMS - 1)).to(tl.int32), 0), _CLAIMS - 1)
    bucket = tl.minimum(tl.maximum(depth - 1, 0), _DEPTHS - 1) * _CLAIMS + step
    made = tl.minimum(claim * tl.load(rates + bucket, mask=active, other=0.0), _CEILING)
    return claim, bucket, made, above


prune_trees = partial(reference.prune_trees, correct=correct_survival)
