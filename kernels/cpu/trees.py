"""The compiled twins of `kernels.trees`."""

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import address, function
from kernels.trees import DraftTree, Fates


class Trees(ctypes.Structure):
    """`Trees` of trees.h, and what it points to."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "parents", "depths", "survival", "num_nodes")),
        ("width", ctypes.c_int64),
    ]

    kept: list[Tensor]

    @staticmethod
    def of(tree: DraftTree) -> "Trees":
        parts = [value.contiguous() for value in tree]
        trees = Trees(*map(address, parts), tree.width)
        trees.kept = parts
        return trees


def empty_tree(batch: int, width: int) -> DraftTree:
    """One to be written."""
    tokens, parents, depths = torch.empty(3, batch, width, dtype=torch.int64).unbind()
    return DraftTree(tokens, parents, depths, torch.empty(batch, width), torch.empty(batch, dtype=torch.int64))


def merge_trees(raw: DraftTree, max_nodes: int) -> tuple[DraftTree, Tensor]:
    """As the reference."""
    return _cut(raw, max_nodes, merges=True)


def likeliest_nodes(raw: DraftTree, max_nodes: int) -> tuple[DraftTree, Tensor]:
    """As the reference."""
    return _cut(raw, max_nodes, merges=False)


def fates(tokens: Tensor, parents: Tensor, depths: Tensor, committed: Tensor, counts: Tensor) -> Fates:
    """As the reference."""
    nodes = [value.contiguous() for value in (tokens, parents, depths)]
    committed, counts = committed.contiguous(), counts.contiguous()
    tried, came_true = (torch.empty(tokens.shape, dtype=torch.bool) for _ in range(2))
    given = *map(address, nodes), *tokens.shape, committed.data_ptr(), committed.shape[1], counts.data_ptr()
    function("fates", "pppnnpnppp")(*given, tried.data_ptr(), came_true.data_ptr())
    return Fates(tried, came_true)


def ancestor_matrix(parents: Tensor) -> Tensor:
    """As the reference."""
    (batch, nodes), parents = parents.shape, parents.contiguous()
    above = torch.empty(batch, nodes, nodes, dtype=torch.bool)
    function("ancestor_matrix", "pnnp")(parents.data_ptr(), batch, nodes, above.data_ptr())
    return above


def _cut(raw: DraftTree, max_nodes: int, *, merges: bool) -> tuple[DraftTree, Tensor]:
    tree = empty_tree(raw.batch, min(max_nodes, raw.width))
    chosen = torch.empty_like(tree.tokens)
    call, given = function("merge_trees", "pnipp"), (ctypes.byref(Trees.of(raw)), raw.batch, merges)
    call(*given, ctypes.byref(Trees.of(tree)), chosen.data_ptr())
    return tree, chosen
