# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""Tokens drawn on a device: noise, temperature and argmax of `kernels/sample.py` in one pass, without storing noise.

The hash is integers: its bits are the CPU's. The float steps are the reference's, in its order, with correctly rounded
division and no contraction; logarithms are libdevice's, which are the ones that torch calls on the same device but may
differ from a CPU's in the last bit. So the same logits may, in a near-tie, give another token than on a CPU; on one
device plain and speculative decoding draw with the same code, and a row's token does not depend on its company.

Legend: rows, vocab as in the reference; part = BLOCK tokens of a row.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernels.sample import Choice

_BLOCK = 1024


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Choice:
    """As the reference's `sample`."""
    # logits [rows, vocab], any float type; seeds, positions [rows] int64; temperatures [rows] float32, 0 = likeliest
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row stand side by side"
    parts = triton.cdiv(vocab, _BLOCK)
    highest = logits.amax(-1).float()  # a NaN, if there is one
    best_scores = highest.new_empty(rows, parts)
    best_tokens = seeds.new_empty(rows, parts)
    _best_of_parts[rows, parts](
        logits,
        highest,
        seeds,
        positions,
        temperatures,
        best_scores,
        best_tokens,
        vocab,
        logits.stride(0),
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    bad_rows = ~highest.isfinite()
    winner = best_scores.max(-1).indices  # the first of equals, which holds the lowest id
    return Choice(best_tokens.gather(1, winner[:, None]).squeeze(1).masked_fill(bad_rows, 0), bad_rows)


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
    """The best token of one part of one row, and its score."""
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
    """The noise of some tokens at one position; formula and reasons in `kernels/gumbel.py`."""
    # token [tokens] int32 -> [tokens] float32
    u = hash_bits(seed, position, token).to(tl.float32)
    u = tl.minimum((u + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)  # 2^-32, 1 - 2^-24
    return -libdevice.log(-libdevice.log1p(-u))


@triton.jit
def hash_bits(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """32 random bits of each token: the lowbias32 mixer over its id, half of the row's SplitMix64 key per round."""
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
