"""Chooses each row's token: the likeliest one, or an exact sample, by Gumbel noise, of the tokens that filters keep.

    token = argmax_v ( (z[v] - max z) / T + g(seed, position, v) ),   argmax_v z[v] at T = 0

Adding Gumbel noise to scaled logits and taking the argmax samples from their softmax (the Gumbel-max trick). The noise
is a pure function of (seed, position, token id): every draft path that reaches a position meets the same noise there,
whatever else is in the batch. Since the maximum is subtracted first, no temperature, however small, makes two scores
infinite.

Filters keep tokens that are at least min_p times as likely as the likeliest, of these the top k, and of these the
nucleus; for others z[v] = -inf. Equal scores rank by id, lower first, and masses are summed as integers: what a row
keeps depends on no other row, on no order of summation and on no threshold that a rounding could move. A score is a
logit, scaled by the temperature, up to a constant of its row. Legend: rows = logits that choose a token, vocab = token
ids."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

OFF = float("-inf")
"""Value of `log_min_p` without a filter, and score of a dropped token."""

_NOISE_AT_ONCE = 1 << 18  # 1 MiB: what stays in a core's second-level cache through all passes
UNIT = 2.0**44  # mass of a token of score 0; a vocabulary of 2^18 such tokens still fits 63 bits
_NUMBERS_AT_ONCE = 1 << 17  # 1 MiB of int64: what stays in a core's second-level cache


Noise = Callable[[Tensor, Tensor], Tensor]
"""An implementation of `noise_of_tokens`."""


class ChosenTokens(NamedTuple):
    """The chosen token of each row, and the rows without a valid choice."""

    tokens: Tensor  # [rows] int64, 0 for a bad row
    bad_rows: Tensor  # [rows] int64, 1 if the best score is not finite (NaN, overflow, every token forbidden), else 0


class Filters(NamedTuple):
    """Parameters of each row's filters; rows of temperature 0 are not filtered."""

    log_min_p: Tensor  # [rows] float32, log of the least probability relative to the likeliest token, -inf = off
    top_k: Tensor  # [rows] int64, at most vocab, 0 = off
    top_p: Tensor  # [rows] float64, 1 = off

    @staticmethod
    def off(rows: Tensor) -> "Filters":
        """Build filters that keep all tokens. # rows [rows] int64, of which only the length counts"""
        return Filters(torch.full_like(rows, OFF, dtype=torch.float32), rows * 0, rows.double() * 0 + 1)

    def of(self, rows: Tensor) -> "Filters":
        """Select the filters of some rows. # rows [picked] int64 or [rows] bool"""
        return Filters(self.log_min_p[rows], self.top_k[rows], self.top_p[rows])


def noise_of_tokens(keys: Tensor, tokens: Tensor) -> Tensor:
    """Compute the Gumbel noise of tokens, as `gumbel_noise_of`, from the `row_keys` of rows.
    # keys [rows, 2], tokens [picked] int32 -> [rows, picked]"""
    noise = torch.empty(keys.shape[0], tokens.shape[0], dtype=torch.float32, device=keys.device)
    rows_at_once = max(1, _NOISE_AT_ONCE // max(1, tokens.shape[0]))
    for start in range(0, len(keys), rows_at_once):
        part = slice(start, start + rows_at_once)
        _fill(noise[part], hash_bits(keys[part], tokens))
    return noise


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    filters: Filters | None = None,
    *,
    noise: Noise = noise_of_tokens,
) -> ChosenTokens:
    """Sample the token of each row, which depends only on the row's logits, seed, position, temperature and filters.
    Ties go to the lowest id.
    # logits [rows, vocab], any float type; seeds, positions [rows] int64; temperatures [rows] float32, 0 = likeliest"""
    scores, warm = logits.to(torch.float32, copy=True), temperatures > 0
    if warm.all():
        return choose_likeliest(_drawn(noise, scores, seeds, positions, temperatures, filters))
    kept = None if filters is None else filters.of(warm)
    scores[warm] = _drawn(noise, scores[warm], seeds[warm], positions[warm], temperatures[warm], kept)
    return choose_likeliest(scores)


def choose_likeliest(scores: Tensor) -> ChosenTokens:
    """Choose the token of highest score in each row; ties go to the lowest id.
    # scores [rows, vocab], any float type -> [rows]"""
    best = scores.max(dim=-1)  # NaN if the row has one
    bad_rows = ~best.values.isfinite()
    return ChosenTokens(best.indices.masked_fill(bad_rows, 0), bad_rows.long())


def _drawn(
    noise_of: Noise, scores: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters | None
) -> Tensor:
    """Scale and filter scores and add noise, in place. # scores [rows, vocab] float32"""
    scores.sub_(scores.amax(-1, keepdim=True)).div_(temperatures[:, None])
    noise = _noise_of_rows(noise_of, seeds, positions, scores.shape[1])
    if filters is not None:
        if (filters.log_min_p > OFF).any():
            scores.masked_fill_(scores < filters.log_min_p[:, None], OFF)
        keep_top_k(scores, filters.top_k)
        narrow_to_nucleus(scores, noise, filters.top_p)
    return scores.add_(noise)


def _noise_of_rows(noise_of: Noise, seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Compute each row's noise, once for all rows that share a key. # -> [rows, vocab]"""
    keys, tokens = row_keys(seeds, positions), token_ids(vocab, seeds.device)
    if len(keys) == 1:
        return noise_of(keys, tokens)
    few, row_key = keys.view(torch.int64).squeeze(1).unique(return_inverse=True)
    return noise_of(few.view(torch.int32).view(-1, 2), tokens)[row_key]


def keep_top_k(scores: Tensor, top_k: Tensor) -> None:
    """Drop all but the `top_k` likeliest tokens of each row, in place.
    # scores [rows, vocab] float32; top_k [rows] int64, 0 = off"""
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
    """Drop tokens in place until the best of scores + noise is in the nucleus, the fewest likeliest tokens with mass
    top_p. The scores' maximum must be 0. A token belongs to the nucleus when the tokens ranked above it hold less than
    the share top_p of the mass. If the best one does not belong, nothing ranked below it does, so dropping those and
    looking again finds the token that sorting the vocabulary would, in about 1 + log2(1 / top_p) rounds.
    # scores, noise [rows, vocab] float32; top_p [rows] float64, 1 = off"""
    narrowed = (top_p < 1).nonzero().squeeze(1)
    for part in _parts(len(narrowed), scores.shape[1]):
        rows = narrowed[part]
        scores[rows] = _narrowed(scores[rows], noise[rows], top_p[rows])


def likeliest(scores: Tensor, k: int) -> Tensor:
    """Find the ids of each row's k likeliest tokens, likeliest first. # [rows, vocab] float32 -> [rows, k] int64"""
    ids = torch.empty(scores.shape[0], k, dtype=torch.int64, device=scores.device)
    for part in _parts(*scores.shape):
        ids[part] = (scores.shape[1] - 1) - (_rank_keys(scores[part]).topk(k).values & 0xFFFFFFFF)
    return ids


def _narrowed(scores: Tensor, noise: Tensor, top_p: Tensor) -> Tensor:
    """Drop tokens that are found to rank below the nucleus, see `narrow_to_nucleus`.
    # scores, noise [rows, vocab]; top_p [rows] -> like scores"""
    mass = scores.exp().mul_(UNIT).to(torch.int64)
    limit = mass.sum(-1) * top_p
    while True:
        above = _ranked_above(scores, (scores + noise).argmax(-1, keepdim=True))
        # the likeliest token stays even at top_p = 0
        outside = above.any(-1) & ((mass * above).sum(-1) >= limit)
        if not outside.any():  # one transfer to the host per round
            return scores
        scores.masked_fill_(~above & outside[:, None], OFF)


def _ranked_above(scores: Tensor, token: Tensor) -> Tensor:
    """Mark the tokens that rank above the row's token: a higher score, or the same score and a lower id.
    # scores [rows, vocab]; token [rows, 1] int64 -> [rows, vocab] bool"""
    score = scores.gather(1, token)
    ids = torch.arange(scores.shape[1], device=scores.device)
    return (scores > score) | ((scores == score) & (ids < token))


def _rank_keys(scores: Tensor) -> Tensor:
    """Compute integers that order tokens by score, ties by lower id, and hold vocab - 1 - id in their low half.
    # [rows, vocab] float32 -> [rows, vocab] int64"""
    bits = scores.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # IEEE order as integer order
    ids = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    return (ordered.to(torch.int64) << 32).bitwise_or_(ids)


def _parts(rows: int, vocab: int) -> Iterator[slice]:
    rows_at_once = max(1, _NUMBERS_AT_ONCE // vocab)
    return (slice(start, start + rows_at_once) for start in range(0, rows, rows_at_once))


def gumbel_noise_of(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """g = -log(E), E = -log1p(-u), u = (hash32(seed, position, token id) + 1/2) * 2^-32, clamped to 1 - 2^-24.
    u keeps its relative precision near 0, where E is small and g large: g reaches 22.87 = -log(2^-33). From below it
    is cut at -2.81 = -log(24 log 2), which a Gumbel variable passes with probability 2^-24. So a token whose chance
    against the likeliest one is under e^-25.6 (7e-12) is never drawn, and no other probability moves by more than
    about 2^-24. # seeds, positions [rows] int64; tokens [picked] -> [rows, picked] float32"""
    return noise_of_tokens(row_keys(seeds, positions), tokens.to(torch.int32))


def hash_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """mix(mix(token ^ key_0) ^ key_1), mix the 32-bit `lowbias32` and key_0, key_1 the halves of the row's key.
    # keys [rows, 2] int32, tokens [picked] int32 -> [rows, picked] int32, to be read as uint32"""
    bits = tokens ^ keys[:, :1]
    scratch = torch.empty_like(bits)
    _mix32_(bits, scratch)
    bits.bitwise_xor_(keys[:, 1:])
    _mix32_(bits, scratch)
    return bits


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Compute the key of each row's noise: the position-th output of a SplitMix64 stream that starts at the mixed seed,
    as two 32-bit halves. # seeds, positions [rows] int64 -> [rows, 2] int32"""
    golden = _signed64(0x9E3779B97F4A7C15)
    keys = _mix64(_mix64(seeds + golden) + (positions + 1) * golden)
    return keys.view(torch.int32).view(-1, 2)


def _mix64(state: Tensor) -> Tensor:
    """Finalizer of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014."""
    state = (state ^ _shift_right(state, 30)) * _signed64(0xBF58476D1CE4E5B9)
    state = (state ^ _shift_right(state, 27)) * _signed64(0x94D049BB133111EB)
    return state ^ _shift_right(state, 31)


def _mix32_(bits: Tensor, scratch: Tensor) -> None:
    """The `lowbias32` finalizer: C. Wellons, "Prospecting for hash functions", 2018 (bias 0.17 of 1,000)."""
    # int32 wraps in torch as uint32 does in hardware, so a device kernel can use uint32 and get the same bits
    _xor_shifted_(bits, 16, scratch)
    bits.mul_(0x7FEB352D)
    _xor_shifted_(bits, 15, scratch)
    bits.mul_(_signed32(0x846CA68B))
    _xor_shifted_(bits, 16, scratch)


def _xor_shifted_(bits: Tensor, shift: int, scratch: Tensor) -> None:
    """bits ^= bits >>> shift; torch shifts signed integers arithmetically, so the copies of the sign are masked."""
    torch.bitwise_right_shift(bits, shift, out=scratch)
    bits.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))


def _shift_right(state: Tensor, shift: int) -> Tensor:
    """Logical right shift of int64."""
    return (state >> shift) & ((1 << (64 - shift)) - 1)


def _fill(noise: Tensor, bits: Tensor) -> None:
    """Write the Gumbel noise of these hash bits into `noise`. # both [rows, picked]"""
    noise.copy_(bits.view(torch.uint32))
    noise.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    noise.neg_().log1p_().neg_().log_().neg_()


@lru_cache(maxsize=8)
def token_ids(vocab: int, device: torch.device) -> Tensor:
    """Return all token ids of a vocabulary, cached. # -> [vocab] int32"""
    return torch.arange(vocab, dtype=torch.int32, device=device)


def _signed32(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _signed64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
