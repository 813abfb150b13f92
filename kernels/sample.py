"""Choosing tokens: the likeliest one, or an exact sample by position-keyed Gumbel noise of what filters leave.

    token = argmax_v ( (z[v] - max z) / T + g(seed, position, v) ),   argmax_v z[v] at T = 0

With the maximum at 0 no temperature, however small, makes two scores infinite. Filters keep tokens that are at least
min_p times as likely as the likeliest, of these the top k, and of these the nucleus; for others z[v] = -inf. Equal
scores rank by id, lower first, and masses are summed as integers: what a row keeps depends on no other row, on no order
of summation and on no threshold that a rounding could move.
Legend: rows = logits that choose a token, vocab = token ids. A score is a logit up to a constant of its row."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.gumbel import noise_of_tokens, row_keys, token_ids

OFF = float("-inf")
"""Of `log_min_p`; also the score of what is dropped."""

UNIT = 2.0**44  # mass of a token of score 0; a vocabulary of 2^18 such tokens still fits 63 bits
_NUMBERS_AT_ONCE = 1 << 17  # 1 MiB of int64: what stays in a core's second-level cache


Noise = Callable[[Tensor, Tensor], Tensor]
"""As `kernels.gumbel.noise_of_tokens`."""


class Choice(NamedTuple):
    """The token of each row."""

    tokens: Tensor  # [rows] int64
    bad_rows: Tensor  # [rows] int64, 1: no finite score to choose by (NaN, overflow, every token forbidden); token is 0


class Filters(NamedTuple):
    """How each row is filtered; rows of temperature 0 are not."""

    log_min_p: Tensor  # [rows] float32, logarithm of the least odds against the likeliest token, -inf = off
    top_k: Tensor  # [rows] int64, at most vocab, 0 = off
    top_p: Tensor  # [rows] float64, 1 = off

    def of(self, rows: Tensor) -> "Filters":
        """Of these rows, by number or by mask."""
        return Filters(self.log_min_p[rows], self.top_k[rows], self.top_p[rows])


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters | None = None
) -> Choice:
    """Each row's token, a function of its own logits, seed, position, temperature and filters; of equals the lowest id.
    # logits [rows, vocab], any float type; seeds, positions [rows] int64; temperatures [rows] float32, 0 = likeliest"""
    return sample_with(noise_of_tokens, logits, seeds, positions, temperatures, filters)


def sample_with(
    noise: Noise, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters | None
) -> Choice:
    """`sample`, with the noise of these keys and tokens."""
    scores, warm = logits.to(torch.float32, copy=True), temperatures > 0
    if warm.all():
        return choose_likeliest(_drawn(noise, scores, seeds, positions, temperatures, filters))
    kept = None if filters is None else filters.of(warm)
    scores[warm] = _drawn(noise, scores[warm], seeds[warm], positions[warm], temperatures[warm], kept)
    return choose_likeliest(scores)


def choose_likeliest(scores: Tensor) -> Choice:
    """The token of highest score in each row, the lowest id first among equals: all of plain greedy decoding."""
    # scores [rows, vocab], any float dtype
    best = scores.max(dim=-1)  # finds a NaN, if there is one
    bad_rows = ~best.values.isfinite()
    return Choice(best.indices.masked_fill(bad_rows, 0), bad_rows.long())


def _drawn(
    noise_of: Noise, scores: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters | None
) -> Tensor:
    """The scores, scaled, filtered and with noise, in place. # [rows, vocab] float32"""
    scores.sub_(scores.amax(-1, keepdim=True)).div_(temperatures[:, None])
    noise = _noise_of_rows(noise_of, seeds, positions, scores.shape[1])
    if filters is not None:
        if (filters.log_min_p > OFF).any():
            scores.masked_fill_(scores < filters.log_min_p[:, None], OFF)
        keep_top_k(scores, filters.top_k)
        narrow_to_nucleus(scores, noise, filters.top_p)
    return scores.add_(noise)


def _noise_of_rows(noise_of: Noise, seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Noise of each row, computed once for all that share a key. # -> [rows, vocab]"""
    keys, tokens = row_keys(seeds, positions), token_ids(vocab, seeds.device)
    if len(keys) == 1:
        return noise_of(keys, tokens)
    few, row_key = keys.view(torch.int64).squeeze(1).unique(return_inverse=True)
    return noise_of(few.view(torch.int32).view(-1, 2), tokens)[row_key]


def keep_top_k(scores: Tensor, top_k: Tensor) -> None:
    """Drops in place all but the `top_k` likeliest tokens of each row."""
    # scores [rows, vocab] float32; top_k [rows] int64, 0 = off
    counted = (top_k > 0).nonzero().squeeze(1)
    if not counted.shape[0]:
        return
    largest = int(top_k.max())  # planned transfer: where no kernel filters
    for part in _parts(len(counted), scores.shape[1]):
        rows = counted[part]
        keys = _rank_keys(scores[rows])
        border = keys.topk(largest).values.gather(1, top_k[rows, None] - 1)
        scores[rows] = scores[rows].masked_fill_(keys < border, OFF)


def narrow_to_nucleus(scores: Tensor, noise: Tensor, top_p: Tensor) -> None:
    """Drops tokens in place until the best of scores + noise is in the nucleus: the fewest likeliest with mass top_p.
    The scores' maximum must be 0. A token belongs to the nucleus when the tokens ranked above it hold less than the
    share top_p of the mass. If the best one does not belong, nothing ranked below it does, so dropping those and
    looking again finds the very token that sorting the vocabulary would, in about 1 + log2(1 / top_p) looks."""
    # scores, noise [rows, vocab] float32; top_p [rows] float64, 1 = off
    narrowed = (top_p < 1).nonzero().squeeze(1)
    for part in _parts(len(narrowed), scores.shape[1]):
        rows = narrowed[part]
        scores[rows] = _narrowed(scores[rows], noise[rows], top_p[rows])


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
        scores.masked_fill_(~above & outside[:, None], OFF)


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
