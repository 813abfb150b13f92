"""The compiled twin of `kernels.sample`, as far as no noise is drawn."""

import torch
from torch import Tensor

from kernels import sample as reference
from kernels.cpu.library import function
from kernels.sample import Choice, Filters


def choose_likeliest(scores: Tensor) -> Choice:
    """As the reference."""
    scores, (rows, vocab) = scores.contiguous(), scores.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    bad_rows = torch.empty(rows, dtype=torch.bool)
    call = function("choose_likeliest", "pnnppi", scores.dtype)
    call(scores.data_ptr(), rows, vocab, tokens.data_ptr(), bad_rows.data_ptr(), torch.get_num_threads())
    return Choice(tokens, bad_rows)


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters | None = None
) -> Choice:
    """As the reference."""
    if (temperatures > 0).any():
        return reference.sample(logits, seeds, positions, temperatures, filters)
    return choose_likeliest(logits)
