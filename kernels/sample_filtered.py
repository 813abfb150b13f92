"""Tokens drawn from what filters leave: at least min_p times as likely as the likeliest, then the top k, then the
nucleus of these.

The token is that of `kernels/sample.py` with -inf for what is dropped. Equal scores rank by id, lower first, and masses
are sums of integers (`kernels/filters.py`). Legend: rows = logits that choose a token, vocab = token ids.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.filters import keep_top_k, narrow_to_nucleus
from kernels.sample import Choice, choose_likeliest, noise_of_rows

OFF = float("-inf")


class Filters(NamedTuple):
    """How each row is filtered; rows of temperature 0 are not."""

    log_min_p: Tensor  # [rows] float32, logarithm of the least odds against the likeliest token, -inf = off
    top_k: Tensor  # [rows] int64, at most vocab, 0 = off
    top_p: Tensor  # [rows] float64, 1 = off

    def of(self, rows: Tensor) -> "Filters":
        """Of these rows, by number or by mask."""
        return Filters(self.log_min_p[rows], self.top_k[rows], self.top_p[rows])


def sample_filtered(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters) -> Choice:
    """Each row's token, a function of its own logits, seed, position, temperature and filters."""
    # logits [rows, vocab], any float type; seeds, positions [rows] int64; temperatures [rows] float32, 0 = likeliest
    scores, warm = logits.to(torch.float32, copy=True), temperatures > 0
    if warm.all():
        return choose_likeliest(_drawn(scores, seeds, positions, temperatures, filters))
    scores[warm] = _drawn(scores[warm], seeds[warm], positions[warm], temperatures[warm], filters.of(warm))
    return choose_likeliest(scores)


def _drawn(scores: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters) -> Tensor:
    """The scores, scaled, filtered and with noise, in place. # [rows, vocab] float32"""
    scores.sub_(scores.amax(-1, keepdim=True)).div_(temperatures[:, None])
    if (filters.log_min_p > OFF).any():
        scores.masked_fill_(scores < filters.log_min_p[:, None], OFF)
    _keep_top_k(scores, filters.top_k)
    noise = noise_of_rows(seeds, positions, scores.shape[1])
    narrow_to_nucleus(scores, noise, filters.top_p)
    return scores.add_(noise)


def _keep_top_k(scores: Tensor, top_k: Tensor) -> None:
    counted = (top_k > 0).nonzero().squeeze(1)
    if counted.shape[0]:
        part = scores[counted]
        keep_top_k(part, top_k[counted] - 1, int(top_k.max()))
        scores[counted] = part
