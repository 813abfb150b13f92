"""Compiled ops of `kernels.sample`, and its noise."""

import torch
from torch import Tensor

from kernels import sample as reference
from kernels.cpu.library import call
from kernels.sample import ChosenTokens, Filters, row_keys


def choose_likeliest(scores: Tensor) -> ChosenTokens:
    """As the reference. # [rows, vocab] -> [rows]"""
    return _choose(scores, None, None)


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters | None = None
) -> ChosenTokens:
    """As the reference, given the same logarithm. # logits [rows, vocab] -> [rows]"""
    if filters is None:
        return _choose(logits, row_keys(seeds, positions), temperatures)
    return reference.sample(logits, seeds, positions, temperatures, filters, noise=noise_of_tokens)


def noise_of_tokens(keys: Tensor, tokens: Tensor) -> Tensor:
    """As the reference's, given the same logarithm. # keys [rows, 2], tokens [picked] -> [rows, picked]"""
    noise = torch.empty(keys.shape[0], tokens.shape[0])
    call("gumbel_noise", keys, tokens, noise, *noise.shape)
    return noise


def _choose(scores: Tensor, keys: Tensor | None, temperatures: Tensor | None) -> ChosenTokens:
    tokens, bad_rows = (torch.empty(scores.shape[0], dtype=torch.int64) for _ in range(2))
    scores = scores.contiguous()
    call("choose", scores, keys, temperatures, *scores.shape, tokens, bad_rows, dtype=scores.dtype)
    return ChosenTokens(tokens, bad_rows)
