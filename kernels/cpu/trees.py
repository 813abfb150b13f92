"""Compiled ops of `kernels.trees`."""

import torch
from torch import Tensor

from kernels.cpu.library import CStruct, call, contiguous
from kernels.trees import DraftTree, Fates


def trees_of(tree: DraftTree) -> CStruct:
    """`Trees` of trees.h, to be read or, where the tree has no gaps, written."""
    return CStruct(*contiguous(*tree), tree.width)


def empty_tree(batch: int, width: int) -> DraftTree:
    """Trees with uninitialised values, to be written by a kernel. # [batch, width]"""
    tokens, parents, depths = torch.empty(3, batch, width, dtype=torch.int64).unbind()
    return DraftTree(tokens, parents, depths, torch.empty(batch, width), torch.empty(batch, dtype=torch.int64))


def merge_trees(raw: DraftTree, max_nodes: int) -> tuple[DraftTree, Tensor]:
    """As the reference. # -> tree, [batch, nodes] int64"""
    return _cut(raw, max_nodes, merges=True)


def likeliest_nodes(raw: DraftTree, max_nodes: int) -> tuple[DraftTree, Tensor]:
    """As the reference. # -> tree, [batch, nodes] int64"""
    return _cut(raw, max_nodes, merges=False)


def fates(tokens: Tensor, parents: Tensor, depths: Tensor, committed: Tensor, counts: Tensor) -> Fates:
    """As the reference. # -> [batch, nodes]"""
    tried, came_true = (torch.empty(tokens.shape, dtype=torch.bool) for _ in range(2))
    *nodes, committed, counts = contiguous(tokens, parents, depths, committed, counts)
    call("fates", *nodes, *tokens.shape, committed, committed.shape[1], counts, tried, came_true)
    return Fates(tried, came_true)


def ancestor_matrix(parents: Tensor) -> Tensor:
    """As the reference. # [batch, nodes] -> [batch, nodes, nodes]"""
    batch, nodes = parents.shape
    above = torch.empty(batch, nodes, nodes, dtype=torch.bool)
    call("ancestor_matrix", parents.contiguous(), batch, nodes, above)
    return above


def _cut(raw: DraftTree, max_nodes: int, *, merges: bool) -> tuple[DraftTree, Tensor]:
    tree = empty_tree(raw.batch, min(max_nodes, raw.width))
    chosen = torch.empty_like(tree.tokens)
    call("merge_trees", trees_of(raw), raw.batch, merges, trees_of(tree), chosen)
    return tree, chosen
