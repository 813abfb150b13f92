"""The compiled twins of `kernels.hit_rates`."""

import ctypes

from torch import Tensor

from kernels.cpu.library import address, function
from kernels.cpu.trees import Trees
from kernels.hit_rates import HitCounts
from kernels.trees import DraftTree


class _Hits(ctypes.Structure):
    """`Hits` of pruning.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("prior_true", "prior_expected", "came_true", "expected", "rates")),
        ("buckets", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("decay", "low", "high")),
    ]

    @staticmethod
    def of(counts: HitCounts) -> "_Hits":
        tables = counts.prior_true, counts.prior_expected, counts.came_true, counts.expected, counts.rates
        return _Hits(*map(address, tables), len(counts.rates), counts.decay, counts.low, counts.high)


def count_hits(counts: HitCounts, buckets: Tensor, came_true: Tensor, expected: Tensor) -> None:
    """As the reference."""
    labels = buckets.contiguous(), came_true.float().contiguous(), expected.float().contiguous()
    call = function("count_hits", "ppppn")
    call(ctypes.byref(_Hits.of(counts)), *map(address, labels), buckets.numel())


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
    """As the reference."""
    rest = claimed.contiguous(), buckets.contiguous(), committed.contiguous(), num_known.contiguous()
    ours, claims, texts, known = map(address, rest)
    call, tables = function("count_claims", "ppnfpnpppnp"), (bins.data_ptr(), bins.shape[1], bin_decay)
    given = ctypes.byref(Trees.of(trees)), trees.batch, ours, claims, texts, committed.shape[1], known
    call(ctypes.byref(_Hits.of(counts)), *tables, *given)
