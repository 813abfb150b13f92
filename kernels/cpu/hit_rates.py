"""The compiled twins of `kernels.hit_rates`."""

import ctypes

from torch import Tensor

from kernels.cpu.library import address, function
from kernels.cpu.trees import Trees
from kernels.hit_rates import HitCounts, Proposed
from kernels.trees import DraftTree


class _Hits(ctypes.Structure):
    """`Hits` of hit_rates.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("prior_true", "prior_expected", "came_true", "expected", "rates")),
        ("buckets", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("decay", "low", "high")),
    ]

    @staticmethod
    def of(counts: HitCounts) -> "_Hits":
        tables = counts.prior_true, counts.prior_expected, counts.came_true, counts.expected, counts.rates
        return _Hits(*map(address, tables), len(counts.rates), counts.decay, counts.low, counts.high)


class _Proposed(ctypes.Structure):
    """`Proposed` of hit_rates.cpp."""

    _fields_ = [*((name, ctypes.c_void_p) for name in Proposed._fields), ("width", ctypes.c_int64)]

    @staticmethod
    def of(log: Proposed) -> "_Proposed":
        return _Proposed(*map(address, log), log.tokens.shape[1])


def count_hits(counts: HitCounts, buckets: Tensor, came_true: Tensor, expected: Tensor) -> None:
    """As the reference."""
    labels = buckets.contiguous(), came_true.float().contiguous(), expected.float().contiguous()
    function("count_hits", "ppppn")(ctypes.byref(_Hits.of(counts)), *map(address, labels), buckets.numel())


def keep_proposed(
    log: Proposed, rows: Tensor, tree: DraftTree, chosen: Tensor, predicted: Tensor, buckets: Tensor
) -> None:
    """As the reference."""
    rows, chosen, predicted, buckets = (value.contiguous() for value in (rows, chosen, predicted, buckets))
    given = rows.data_ptr(), tree.batch, ctypes.byref(Trees.of(tree))
    call, known = function("keep_proposed", "ppnppppn"), ctypes.byref(_Proposed.of(log))
    call(known, *given, chosen.data_ptr(), predicted.data_ptr(), buckets.data_ptr(), buckets.numel())


def judge_proposed(
    log: Proposed, counts: HitCounts, rows: Tensor, tokens: Tensor, lengths: Tensor, further: int
) -> Tensor:
    """As the reference."""
    rows, tokens, lengths = (value.contiguous() for value in (rows, tokens, lengths))
    came = rows.new_empty(2)
    known = ctypes.byref(_Proposed.of(log)), ctypes.byref(_Hits.of(counts))
    call = function("judge_proposed", "pppnpnpnp")
    call(
        *known,
        rows.data_ptr(),
        *tokens.shape[:1],
        tokens.data_ptr(),
        tokens.shape[1],
        lengths.data_ptr(),
        further,
        came.data_ptr(),
    )
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
    """As the reference."""
    rest = claimed.contiguous(), buckets.contiguous(), committed.contiguous(), num_known.contiguous()
    ours, claims, texts, known = map(address, rest)
    call, tables = function("count_claims", "ppnfpnpppnp"), (bins.data_ptr(), bins.shape[1], bin_decay)
    given = ctypes.byref(Trees.of(trees)), trees.batch, ours, claims, texts, committed.shape[1], known
    call(ctypes.byref(_Hits.of(counts)), *tables, *given)
