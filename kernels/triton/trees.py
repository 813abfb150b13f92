# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""Ops of `kernels/trees.py` and `kernels/survival.py` in one launch each. A program handles a tree, and each lane walks
up the path of one node. A path has about ten steps; the reference takes two launches per pointer doubling."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import survival as reference
from kernels.survival import CEILING, CLAIMS, DEPTHS, Corrected
from kernels.tree_attention import MAX_DEPTH
from kernels.trees import DraftTree, Fates

_FEWEST = 64


def lanes(nodes: int) -> int:
    """Number of lanes of a program for a tree of `nodes` nodes."""
    return int(triton.next_power_of_2(max(nodes, _FEWEST)))


def fates(tokens: Tensor, parents: Tensor, depths: Tensor, committed: Tensor, counts: Tensor) -> Fates:
    """Same as the reference op.
    # tokens, parents, depths [batch, nodes]; committed [batch, longest] -> [batch, nodes]"""
    batch, nodes = tokens.shape
    tried, came_true = tokens.new_empty(2, batch, nodes, dtype=torch.bool)
    if batch and nodes:
        trees = [part if part.stride(1) == 1 else part.contiguous() for part in (tokens, parents, depths)]
        _judge[(batch,)](
            *trees, *(part.stride(0) for part in trees), committed.contiguous(), counts, tried, came_true,
            nodes, committed.shape[1], MOST=MAX_DEPTH, NODES=lanes(nodes),
            enable_fp_fusion=True,
        )  # fmt: skip
    return Fates(tried, came_true)


@triton.jit(do_not_specialize=["nodes", "longest", "token_stride", "parent_stride", "depth_stride"])
def _judge(
    tokens: tl.tensor,
    parents: tl.tensor,
    depths: tl.tensor,
    token_stride: tl.tensor,
    parent_stride: tl.tensor,
    depth_stride: tl.tensor,
    committed: tl.tensor,
    counts: tl.tensor,
    tried: tl.tensor,
    came_true: tl.tensor,
    nodes: tl.tensor,
    longest: tl.tensor,
    MOST: tl.constexpr,
    NODES: tl.constexpr,
) -> None:
    """Mark the nodes that were tried, and the nodes that came true."""
    line, node = tl.program_id(0).to(tl.int64), tl.arange(0, NODES).to(tl.int64)
    exists, count = node < nodes, tl.load(counts + line)
    tokens, parents, depths = tokens + line * token_stride, parents + line * parent_stride, depths + line * depth_stride
    text = committed + line * longest
    depth = tl.load(depths + node, mask=exists, other=0)
    known = (depth > 0) & (depth <= count)
    equal = _is_committed(tokens, depths, text, node, exists, count, longest)
    above = tl.load(parents + node, mask=exists, other=-1)
    holds, level = exists, 0
    while (tl.max(tl.where(holds, above, -1), 0) >= 0) & (level < MOST):
        active = holds & (above >= 0)
        holds = tl.where(active, _is_committed(tokens, depths, text, above, active, count, longest), holds)
        above = tl.load(parents + above, mask=active, other=-1)
        level += 1
    at = line * nodes + node
    tl.store(tried + at, holds & known, mask=exists)
    tl.store(came_true + at, holds & equal, mask=exists)


@triton.jit
def _is_committed(
    tokens: tl.tensor,
    depths: tl.tensor,
    text: tl.tensor,
    node: tl.tensor,
    active: tl.tensor,
    count: tl.tensor,
    longest: tl.tensor,
) -> tl.tensor:
    """Whether the tokens of these nodes are committed at their depths."""
    depth = tl.load(depths + node, mask=active, other=0)
    known = active & (depth > 0) & (depth <= count)
    place = tl.minimum(tl.maximum(depth - 1, 0), longest - 1)
    return known & (tl.load(tokens + node, mask=known, other=-2) == tl.load(text + place, mask=known, other=-3))


def ancestor_matrix(parents: Tensor) -> Tensor:
    """Same as the reference op. # [batch, nodes] -> [batch, nodes, nodes]"""
    batch, nodes = parents.shape
    above = parents.new_zeros(batch, nodes, nodes, dtype=torch.bool)
    if batch and nodes:
        _mark[(batch,)](
            parents.contiguous(), above, nodes, MOST=MAX_DEPTH, NODES=lanes(nodes),
            enable_fp_fusion=True,
        )  # fmt: skip
    return above


@triton.jit(do_not_specialize=["nodes"])
def _mark(parents: tl.tensor, above: tl.tensor, nodes: tl.tensor, MOST: tl.constexpr, NODES: tl.constexpr) -> None:
    """Mark every node on a node's path, the node itself included."""
    line, node = tl.program_id(0).to(tl.int64), tl.arange(0, NODES).to(tl.int64)
    here, row, level = tl.where(node < nodes, node, -1), above + (line * nodes + node) * nodes, 0
    while (tl.max(here, 0) >= 0) & (level < MOST):
        tl.store(row + here, True, mask=here >= 0)
        here = tl.load(parents + line * nodes + here, mask=here >= 0, other=-1)
        level += 1


_CEILING, _CLAIMS, _DEPTHS = tl.constexpr(CEILING), tl.constexpr(CLAIMS), tl.constexpr(DEPTHS)


judge_proposed = partial(reference.judge_proposed, walk=fates)
count_claims = partial(reference.count_claims, walk=fates)


def correct_survival(candidates: DraftTree, deepest: Tensor, rates: Tensor) -> Corrected:
    """Same as the reference op.
    # candidates [batch, nodes]; deepest [batch]; rates [DEPTHS * CLAIMS] -> [batch, nodes]"""
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
    """Return each node's claimed conditional, its bucket, its corrected conditional, and its parent."""
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
