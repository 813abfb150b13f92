"""Choosing tokens: the likeliest one, or an exact sample by position-keyed Gumbel noise.

    token = argmax_v ( (z[v] - max z) / T + g(seed, position, v) ),   argmax_v z[v] at T = 0

With the maximum at 0 no temperature, however small, makes two scores infinite. Knows nothing of penalties, filters or
trees. Legend: rows = logits that choose a token, vocab = token ids.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.gumbel import noise_of_keys, row_keys


class Choice(NamedTuple):
    """The token of each row."""

    tokens: Tensor  # [rows] int64
    bad_rows: Tensor  # [rows] bool: no finite score to choose by (NaN, overflow, or every token forbidden); token is 0


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Choice:
    """Each row's token, a function of its own logits, seed, position and temperature; of equals the lowest id."""
    # logits [rows, vocab], any float type; seeds, positions [rows] int64; temperatures [rows] float32, 0 = likeliest
    scores, warm = logits.to(torch.float32, copy=True), temperatures > 0
    if warm.all():
        return choose_likeliest(_drawn(scores, seeds, positions, temperatures))
    scores[warm] = _drawn(scores[warm], seeds[warm], positions[warm], temperatures[warm])
    return choose_likeliest(scores)


def choose_likeliest(scores: Tensor) -> Choice:
    """The token of highest score in each row, the lowest id first among equals: all of plain greedy decoding."""
    # scores [rows, vocab], any float dtype
    best = scores.max(dim=-1)  # finds a NaN, if there is one
    bad_rows = ~best.values.isfinite()
    return Choice(best.indices.masked_fill(bad_rows, 0), bad_rows)


def _drawn(scores: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Tensor:
    """The scores, scaled and with noise, in place. # [rows, vocab] float32"""
    scores.sub_(scores.amax(-1, keepdim=True)).div_(temperatures[:, None])
    return scores.add_(noise_of_rows(seeds, positions, scores.shape[1]))


def noise_of_rows(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Noise of each row, computed once for all that share a key. # -> [rows, vocab]"""
    keys = row_keys(seeds, positions)
    if len(keys) == 1:
        return noise_of_keys(keys, vocab)
    few, row_key = keys.view(torch.int64).squeeze(1).unique(return_inverse=True)
    return noise_of_keys(few.view(torch.int32).view(-1, 2), vocab)[row_key]
