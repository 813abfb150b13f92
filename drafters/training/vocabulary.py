"""Which of the target's tokens a drafter can propose: those it is likeliest to need.

A head over the whole vocabulary would cost more than the drafter's layers; the few thousand most frequent tokens of
what the target says cover nearly all of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.training.corpus import Example
from drafters.training.errors import TrainingError

_LABEL_RANKS = 8
_LABEL_WEIGHT = 0.5
"""What the target might have said counts too, or a small corpus would leave out common words by chance."""


def frequent_tokens(examples: Sequence[Example], *, vocab_size: int, size: int) -> Tensor:
    """The `size` tokens of largest expected frequency in responses and labels, ascending. # -> [size] int64"""
    frequency = torch.zeros(vocab_size, dtype=torch.float64)
    for example in examples:
        said = example.tokens[example.prompt :]
        likely = example.top_ids[:, :_LABEL_RANKS].flatten().long()
        _refuse_foreign(said, likely, vocab_size)
        frequency.index_add_(0, said, torch.ones_like(said, dtype=torch.float64))
        odds = example.top_logprobs[:, :_LABEL_RANKS].double().exp().flatten()
        frequency.index_add_(0, likely, _LABEL_WEIGHT * odds)
    return frequency.topk(min(size, vocab_size)).indices.sort().values


def _refuse_foreign(said: Tensor, likely: Tensor, vocab_size: int) -> None:
    largest = max(int(said.max()), int(likely.max()))
    if largest >= vocab_size:
        raise TrainingError(
            f"the features hold token {largest}, but the target has {vocab_size}: they were made for another target"
        )
