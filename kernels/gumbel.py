"""Gumbel noise keyed by position: a pure function of (seed, position, token id), whatever is computed beside it.
Adding it to scaled logits and taking the argmax samples exactly from their softmax, and because the key names the
position and not the draw, every path that reaches a position meets the same noise.
Legend: rows = keys asked for at once, vocab = token ids."""

from functools import lru_cache

import torch
from torch import Tensor

_NUMBERS_AT_ONCE = 1 << 18  # 1 MiB: what stays in a core's second-level cache through all passes


def gumbel_noise_of(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """g = -log(E), E = -log1p(-u), u = (hash32(seed, position, token id) + 1/2) * 2^-32, clamped to 1 - 2^-24.
    u keeps its relative precision near 0, where E is small and g large: g reaches 22.87 = -log(2^-33). From below it
    is cut at -2.81 = -log(24 log 2), which a Gumbel variable passes with probability 2^-24. So a token whose chance
    against the likeliest one is under e^-25.6 (7e-12) is never drawn, and no other probability moves by more than
    about 2^-24."""
    # seeds, positions [rows] int64; tokens [picked] -> [rows, picked] float32
    return noise_of_tokens(row_keys(seeds, positions), tokens.to(torch.int32))


def noise_of_tokens(keys: Tensor, tokens: Tensor) -> Tensor:
    """`gumbel_noise_of` for rows whose keys are known already."""
    # keys [rows, 2], tokens [picked], int32 -> [rows, picked] float32
    noise = torch.empty(keys.shape[0], tokens.shape[0], dtype=torch.float32, device=keys.device)
    rows_at_once = max(1, _NUMBERS_AT_ONCE // max(1, tokens.shape[0]))
    for start in range(0, len(keys), rows_at_once):
        part = slice(start, start + rows_at_once)
        _fill(noise[part], hash_bits(keys[part], tokens))
    return noise


def hash_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """Two rounds of a 32-bit mixer over the token id, one half of the row's key entering before each round."""
    # keys [rows, 2] int32, tokens [picked] int32 -> [rows, picked] int32, to be read as uint32
    bits = tokens ^ keys[:, :1]
    scratch = torch.empty_like(bits)
    _mix32_(bits, scratch)
    bits.bitwise_xor_(keys[:, 1:])
    _mix32_(bits, scratch)
    return bits


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """All that a row's noise depends on: the position-th output of a SplitMix64 stream whose start is the mixed seed,
    as two 32-bit halves."""
    # [rows] int64 -> [rows, 2] int32
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
    """Turns hash bits into Gumbel noise, in place in `noise`."""
    noise.copy_(bits.view(torch.uint32))
    noise.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    noise.neg_().log1p_().neg_().log_().neg_()


@lru_cache(maxsize=8)
def token_ids(vocab: int, device: torch.device) -> Tensor:
    """Of the whole vocabulary. # -> [vocab] int32"""
    return torch.arange(vocab, dtype=torch.int32, device=device)


def _signed32(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _signed64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
