"""The compiled twin of `kernels.pruning`."""

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import address, function
from kernels.cpu.trees import Trees, empty_tree
from kernels.hit_rates import CEILING, CLAIMS, DEPTHS
from kernels.pruning import SIZES, Pruned
from kernels.trees import DraftTree


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
    """As the reference."""
    batch = candidates.batch
    kept = empty_tree(batch, min(width, candidates.width))
    claimed, buckets = torch.empty_like(kept.survival), torch.empty_like(kept.tokens)
    sizes = torch.empty(batch, SIZES, dtype=torch.int64)
    call = function("prune_trees", "pnpppnnfpnpppppp")
    call(
        *(ctypes.byref(Trees.of(candidates)), batch, *map(address, (deepest, wished, rates)), DEPTHS, CLAIMS, CEILING),
        *(seconds.data_ptr(), len(seconds), weights.data_ptr(), address(widths)),
        *(ctypes.byref(Trees.of(kept)), claimed.data_ptr(), buckets.data_ptr(), sizes.data_ptr()),
    )
    return Pruned(kept, claimed, buckets, sizes)
