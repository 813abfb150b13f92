"""Which tokens a row of scores may be sampled from: the k likeliest, or the nucleus.

Equal scores rank by id, lower first, and masses are summed as integers: what a row keeps depends on no other row,
on no order of summation and on no threshold that a rounding could move. Knows nothing of requests or noise keys.

Legend: rows = independent rows of scores, vocab = token ids. A score is a logit up to a constant of its row.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_DROPPED = float("-inf")
UNIT = 2.0**44  # mass of a token of score 0; a vocabulary of 2^18 such tokens still fits 63 bits
_NUMBERS_AT_ONCE = 1 << 17  # 1 MiB of int64: what stays in a core's second-level cache


def keep_top_k(scores: Tensor, last: Tensor, largest: int) -> None:
    """Drops in place all but the `last` + 1 likeliest tokens of each row; no row keeps more than `largest`."""
    # scores [rows, vocab] float32; last [rows] int64, each < largest
    for part in _parts(*scores.shape):
        keys = _rank_keys(scores[part])
        border = keys.topk(largest).values.gather(1, last[part, None])
        scores[part].masked_fill_(keys < border, _DROPPED)


def narrow_to_nucleus(scores: Tensor, noise: Tensor, top_p: Tensor) -> None:
    """Drops tokens in place until the best of scores + noise is in the nucleus: the fewest likeliest with mass top_p.

    The scores' maximum must be 0. A token belongs to the nucleus when the tokens ranked above it hold less than the
    share top_p of the mass. If the best one does not belong, nothing ranked below it does, so dropping those and
    looking again finds the very token that sorting the vocabulary would, in about 1 + log2(1 / top_p) looks.
    """
    # scores, noise [rows, vocab] float32; top_p [rows] float64, 1 = off
    narrowed = (top_p < 1).nonzero().squeeze(1)
    for part in _parts(len(narrowed), scores.shape[1]):
        idx = narrowed[part]
        scores[idx] = _narrowed(scores[idx], noise[idx], top_p[idx])


def likeliest(scores: Tensor, k: int) -> Tensor:
    """Ids of the k likeliest tokens of each row, likeliest first. # [rows, k] int64"""
    ids = torch.empty(scores.shape[0], k, dtype=torch.int64, device=scores.device)
    for part in _parts(*scores.shape):
        ids[part] = (scores.shape[1] - 1) - (_rank_keys(scores[part]).topk(k).values & 0xFFFFFFFF)
    return ids


def _narrowed(scores: Tensor, noise: Tensor, top_p: Tensor) -> Tensor:
    """The scores with every token dropped that was found to rank below the nucleus."""
    mass = scores.exp().mul_(UNIT).to(torch.int64)
    limit = mass.sum(-1) * top_p
    while True:
        above = _ranked_above(scores, (scores + noise).argmax(-1, keepdim=True))
        # the likeliest token stays even at top_p = 0
        outside = above.any(-1) & ((mass * above).sum(-1) >= limit)
        if not outside.any():  # the host looks once per round
            return scores
        scores.masked_fill_(~above & outside[:, None], _DROPPED)


def _ranked_above(scores: Tensor, token: Tensor) -> Tensor:
    """Which tokens rank above the row's token: a higher score, or the same and a lower id."""
    # scores [rows, vocab]; token [rows, 1] int64 -> [rows, vocab] bool
    score = scores.gather(1, token)
    ids = torch.arange(scores.shape[1], device=scores.device)
    return (scores > score) | ((scores == score) & (ids < token))


def _rank_keys(scores: Tensor) -> Tensor:
    """Integers that order tokens by (score, lower id first) and carry vocab - 1 - id in their low half."""
    # [rows, vocab] float32 -> [rows, vocab] int64
    bits = scores.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # IEEE order as integer order
    ids = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    return (ordered.to(torch.int64) << 32).bitwise_or_(ids)


def _parts(rows: int, vocab: int) -> Iterator[slice]:
    rows_at_once = max(1, _NUMBERS_AT_ONCE // vocab)
    return (slice(start, start + rows_at_once) for start in range(0, rows, rows_at_once))
