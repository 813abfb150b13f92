# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""Sampling of `kernels/sample.py` on a device, without storing noise, sorting, or waiting for the host.
The hash is integers: its bits are the CPU's. The float steps are the reference's, in its order, with correctly rounded
division and no contraction; logarithms are libdevice's, which are the ones that torch calls on the same device but may
differ from a CPU's in the last bit. So the same logits may, in a near-tie, give another token than on a CPU; on one
device plain and speculative decoding draw with the same code, and a row's token does not depend on other rows.
Without filters noise, temperature and argmax are one pass over parts of a row. With filters one program per row looks
for the best of scores + noise, counts what ranks above it and their mass, and is done unless that is too much for a
filter; then nothing ranked below can be in, and it looks again above. A likely token is found at once: 1 / top_p looks,
whatever the vocabulary. Only the mass that top k leaves to the nucleus takes more passes: they halve the range of
scores until its border is known to the bit.
Legend: rows, vocab as in the reference; part = BLOCK tokens of a row; distance = bits of |score|, scores being at most
0 once they are scaled."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernels.sample import UNIT, ChosenTokens, Filters

_BLOCK = 1024
_FILTERED_BLOCK = 2048
_UNIT = tl.constexpr(UNIT)
_FARTHEST = tl.constexpr(0x7F800000)  # distance of a score of -inf from 0, see `_distance`


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters | None = None
) -> ChosenTokens:
    """Same as the reference op. # logits [rows, vocab] -> [rows]"""
    assert logits.stride(1) == 1, "the logits of a row stand side by side"
    highest = logits.amax(-1).float()  # a NaN, if there is one
    bad_rows = ~highest.isfinite()
    inputs = (logits, highest, seeds, positions, temperatures)
    tokens = _best_of_all(*inputs) if filters is None else _best_of_kept(*inputs, filters)
    return ChosenTokens(tokens.masked_fill(bad_rows, 0), bad_rows.long())


def _best_of_all(logits: Tensor, highest: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Tensor:
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _BLOCK)
    best_scores, best_tokens = highest.new_empty(rows, parts), seeds.new_empty(rows, parts)
    _best_of_parts[rows, parts](
        logits, highest, seeds, positions, temperatures, best_scores, best_tokens, vocab, logits.stride(0),
        BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    winner = best_scores.max(-1).indices  # the first of equals, which holds the lowest id
    return best_tokens.gather(1, winner[:, None]).squeeze(1)


def _best_of_kept(
    logits: Tensor, highest: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters
) -> Tensor:
    rows, vocab = logits.shape
    tokens = seeds.new_empty(rows)
    _draw_row[(rows,)](
        logits, highest, seeds, positions, temperatures, *filters, tokens, vocab, logits.stride(0),
        BLOCK=_FILTERED_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens


@triton.jit
def _best_of_parts(
    logits: tl.tensor,
    highest: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    best_scores: tl.tensor,
    best_tokens: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Find the best token of one part of one row, and its score."""
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    exists = token < vocab
    score = tl.load(logits + row.to(tl.int64) * stride + token, mask=exists, other=-float("inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        noise = gumbel(tl.load(seeds + row), tl.load(positions + row), token)
        top = tl.load(highest + row)
        score = tl.div_rn(score - tl.where(tl.abs(top) < float("inf"), top, 0.0), temperature) + noise
    score = tl.where(exists & (score == score), score, -float("inf"))  # a NaN makes the row bad, whatever is best
    best = tl.argmax(score, 0)  # the lowest of equals
    at = row * tl.num_programs(1) + part
    tl.store(best_scores + at, tl.max(score, 0))
    tl.store(best_tokens + at, (part * BLOCK + best).to(tl.int64))


@triton.jit
def gumbel(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Compute the Gumbel noise of tokens at one position, as `gumbel_noise_of` of `kernels/sample.py`."""
    # token [tokens] int32 -> [tokens] float32
    u = hash_bits(seed, position, token).to(tl.float32)
    u = tl.minimum((u + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)  # 2^-32, 1 - 2^-24
    return -libdevice.log(-libdevice.log1p(-u))


@triton.jit
def hash_bits(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Compute 32 random bits of each token: two rounds of the lowbias32 mixer over its id, with half of the row's
    SplitMix64 key in each."""
    # token [tokens] int32 -> [tokens] uint32
    golden = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix64(_mix64(seed.to(tl.uint64) + golden) + (position + 1).to(tl.uint64) * golden)
    bits = _mix32(token.to(tl.uint32) ^ key.to(tl.uint32))
    return _mix32(bits ^ (key >> 32).to(tl.uint32))


@triton.jit
def _mix64(state: tl.tensor) -> tl.tensor:
    state = (state ^ (state >> 30)) * tl.full([1], 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full([1], 0x94D049BB133111EB, tl.uint64)
    return state ^ (state >> 31)


@triton.jit
def _mix32(bits: tl.tensor) -> tl.tensor:
    bits = (bits ^ (bits >> 16)) * tl.full([1], 0x7FEB352D, tl.uint32)
    bits = (bits ^ (bits >> 15)) * tl.full([1], 0x846CA68B, tl.uint32)
    return bits ^ (bits >> 16)


@triton.jit
def _draw_row(
    logits: tl.tensor,
    highest: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    log_min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    tokens: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    scores = logits + row.to(tl.int64) * stride
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    top, temperature = tl.load(highest + row), tl.load(temperatures + row)
    going = tl.abs(top) < float("inf")
    warm = temperature > 0
    top = tl.where(warm, top, 0.0)
    temperature = tl.where(warm, temperature, 1.0)
    least = tl.where(warm, tl.load(log_min_p + row), -float("inf"))
    count = tl.where(warm, tl.load(top_k + row), 0).to(tl.int32)
    share = tl.where(warm, tl.load(top_p + row), 1.0)
    limit = share + float("inf")
    if going & (share < 1):
        limit = share * _kept_mass(scores, vocab, top, temperature, least, count, BLOCK).to(tl.float64)
    token, score = count * 0 + vocab, temperature * 0.0 - float("inf")
    while going:
        token, score = _best_above(scores, seed, position, vocab, top, temperature, least, warm, token, score, BLOCK)
        number, mass = _ranked_above(scores, vocab, top, temperature, least, token, score, BLOCK)
        going = ((count > 0) & (number >= count)) | ((number > 0) & (mass.to(tl.float64) >= limit))
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _best_above(
    scores: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    warm: tl.tensor,
    below: tl.tensor,
    below_score: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Find the token of highest score plus noise among those that rank above `below` (ties go to the lowest id), and
    its score."""
    best_value, best_score, best = temperature * 0.0 - float("inf"), below_score, below
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = _scaled(scores, token, vocab, top, temperature, least)
        value = score
        if warm:
            value = score + gumbel(seed, position, token)
        value = tl.where(_ranks_above(token, score, below, below_score), value, -float("inf"))
        here, first = tl.max(value, 0), start + tl.argmax(value, 0)
        its_score = tl.max(tl.where(token == first, score, -float("inf")), 0)
        better = here > best_value
        best_value = tl.where(better, here, best_value)
        best_score = tl.where(better, its_score, best_score)
        best = tl.where(better, first, best)
    return best, best_score


@triton.jit
def _ranked_above(
    scores: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    below: tl.tensor,
    below_score: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Count the tokens that rank above `below`, and sum their mass."""
    number = below * 0
    mass = number.to(tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = _scaled(scores, token, vocab, top, temperature, least)
        above = _ranks_above(token, score, below, below_score)
        number += tl.sum(above.to(tl.int32), 0)
        mass += tl.sum(tl.where(above, _mass(score), 0), 0)
    return number, mass


@triton.jit
def _kept_mass(
    scores: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Sum the mass of the `count` likeliest tokens, or of all tokens if `count` is 0."""
    near = count * 0  # the smallest distance within which there are `count` tokens is in [near, far]
    far = near + _FARTHEST
    while (count > 0) & (near < far):
        middle = near + ((far - near) >> 1)
        within = count * 0
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            distance = _distance(_scaled(scores, token, vocab, top, temperature, least))
            within += tl.sum((distance <= middle).to(tl.int32), 0)
        near = tl.where(within >= count, near, middle + 1)
        far = tl.where(within >= count, middle, far)
    within = count * 0
    mass = within.to(tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = _scaled(scores, token, vocab, top, temperature, least)
        nearer = _distance(score) < far
        within += tl.sum(nearer.to(tl.int32), 0)
        mass += tl.sum(tl.where(nearer, _mass(score), 0), 0)
    at_border = _mass(-far.to(tl.float32, bitcast=True))
    return mass + (count - within).to(tl.int64) * at_border


@triton.jit
def _scaled(
    scores: tl.tensor, token: tl.tensor, vocab: tl.tensor, top: tl.tensor, temperature: tl.tensor, least: tl.tensor
) -> tl.tensor:
    """Load and scale scores; -inf for tokens below `least` and for padding. # token [tokens] -> [tokens] float32"""
    score = tl.load(scores + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    score = tl.div_rn(score - top, temperature)
    return tl.where(score >= least, score, -float("inf"))


@triton.jit
def _ranks_above(token: tl.tensor, score: tl.tensor, below: tl.tensor, below_score: tl.tensor) -> tl.tensor:
    return (score > below_score) | ((score == below_score) & (token < below))


@triton.jit
def _mass(score: tl.tensor) -> tl.tensor:
    """Compute the integer mass of scores, which are at most 0. # float32 -> int64"""
    return (tl.exp(tl.minimum(score, 0.0)) * _UNIT).to(tl.int64)


@triton.jit
def _distance(score: tl.tensor) -> tl.tensor:
    """Return integers that rise as scores fall from 0. # float32 -> int32"""
    return tl.abs(score).to(tl.int32, bitcast=True)
