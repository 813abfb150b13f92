"""The compiled twins of `kernels.hit_rates`."""

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import address, function
from kernels.hit_rates import CEILING, CLAIMS, DEPTHS, Corrected, HitCounts
from kernels.trees import DraftTree


class _Hits(ctypes.Structure):
    """`Hits` of trees.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("prior_true", "prior_expected", "came_true", "expected", "rates")),
        ("buckets", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("decay", "low", "high")),
    ]


def count_hits(counts: HitCounts, buckets: Tensor, came_true: Tensor, expected: Tensor) -> None:
    """As the reference."""
    tables = counts.prior_true, counts.prior_expected, counts.came_true, counts.expected, counts.rates
    hits = _Hits(*map(address, tables), len(counts.rates), counts.decay, counts.low, counts.high)
    labels = buckets.contiguous(), came_true.float().contiguous(), expected.float().contiguous()
    function("count_hits", "ppppn")(ctypes.byref(hits), *map(address, labels), buckets.numel())


def correct_survival(candidates: DraftTree, deepest: Tensor, rates: Tensor) -> Corrected:
    """As the reference."""
    nodes = [value.contiguous() for value in (candidates.parents, candidates.depths, candidates.survival)]
    corrected, conditional = torch.empty_like(nodes[2]), torch.empty_like(nodes[2])
    buckets, sizes = torch.empty_like(nodes[1]), candidates.tokens.shape
    call = function("correct_survival", "pppnnppnnfppp")
    given = *map(address, nodes), *sizes, deepest.data_ptr(), rates.data_ptr(), DEPTHS, CLAIMS, CEILING
    call(*given, corrected.data_ptr(), conditional.data_ptr(), buckets.data_ptr())
    return Corrected(corrected, conditional, buckets)
