"""What entries are trained to: how far each is from the target's distribution, and what it weighs.
Legend: flat = entries with a label, top = corpus.TOP."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Loss(NamedTuple):
    """One that training may be told to lower."""

    of_entries: Callable[[Tensor, Tensor], Tensor]
    """p of the target's likeliest tokens, 0 where they cannot be drafted, and log q. # both [flat, top] -> [flat]"""
    reach: float = 0.0
    """Power of what an entry stands for: the target's probability of getting there, times the positions for which one
    is drawn. 1 weighs it as in the trees that the target spans behind every position, branches included; 0 evenly."""


def cross_entropy(p: Tensor, log_q: Tensor) -> Tensor:
    """-sum_v p(v) log q(v)."""
    return -(p * log_q).sum(1)


def total_variation(p: Tensor, log_q: Tensor) -> Tensor:
    """1 - sum_v min(p(v), q(v)); what is beyond the target's likeliest tokens counts as missed."""
    return 1.0 - torch.minimum(p, log_q.exp()).sum(1)


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy),
    "total_variation": Loss(total_variation),
    "tree": Loss(cross_entropy, reach=1.0),
}
