"""The compiled twins of `kernels.sample` and of the noise of `kernels.gumbel`."""

import torch
from torch import Tensor

from kernels.cpu.library import address, function
from kernels.gumbel import row_keys
from kernels.sample import Choice, Filters, sample_with


def choose_likeliest(scores: Tensor) -> Choice:
    """As the reference."""
    return _choose(scores, None, None)


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters | None = None
) -> Choice:
    """As the reference, given the same logarithm."""
    if filters is None:
        return _choose(logits, row_keys(seeds, positions), temperatures)
    return sample_with(noise_of_tokens, logits, seeds, positions, temperatures, filters)


def noise_of_tokens(keys: Tensor, tokens: Tensor) -> Tensor:
    """As `kernels.gumbel.noise_of_tokens`, given the same logarithm."""
    noise, (rows, count) = torch.empty(len(keys), len(tokens)), (len(keys), len(tokens))
    call = function("gumbel_noise", "pppnni")
    call(keys.data_ptr(), tokens.data_ptr(), noise.data_ptr(), rows, count, torch.get_num_threads())
    return noise


def _choose(scores: Tensor, keys: Tensor | None, temperatures: Tensor | None) -> Choice:
    scores, (rows, vocab) = scores.contiguous(), scores.shape
    tokens, bad_rows = (torch.empty(rows, dtype=torch.int64) for _ in range(2))
    call, threads = function("choose", "pppnnppi", scores.dtype), torch.get_num_threads()
    given = scores.data_ptr(), address(keys), address(temperatures)
    call(*given, rows, vocab, tokens.data_ptr(), bad_rows.data_ptr(), threads)
    return Choice(tokens, bad_rows)
