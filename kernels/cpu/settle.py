"""Compiled op of `kernels.settle`."""

import torch
from torch import Tensor

from kernels.cpu.library import CStruct, call, contiguous
from kernels.settle import Verified
from kernels.tree_attention import MAX_DEPTH


def settle(
    table: Tensor,
    choice: tuple[Tensor, Tensor],
    logits: tuple[Tensor, Tensor, Tensor],
    completing: tuple[Tensor, Tensor],
    lines: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    trees: tuple[Tensor, Tensor, Tensor],
    sizes: Tensor,
) -> Verified:
    """As the reference. # table [table rows, max positions]"""
    assert table.is_contiguous(), "it is changed in place"
    step = contiguous(*choice, *logits, *completing, *lines, slots, *trees, sizes)
    batch, width = completing[0].shape[0], trees[0].shape[1]
    depth, (num_sized, numbers) = min(width, MAX_DEPTH), sizes.shape
    each, path, emitted = [batch], [batch, depth + 1], [batch, 1 + numbers + depth + 1]
    shapes = [[batch, depth], each, each, [batch, width + 1], path, emitted, each]
    shapes += [path, path, path, each, each, [batch * width]]
    verified = Verified(*[torch.empty(shape, dtype=torch.int64) for shape in shapes])
    counts = len(choice[0]), batch, width, depth, num_sized, numbers
    call("settle", CStruct(*step), *counts, table, table.shape[1], CStruct(*verified))
    return verified
