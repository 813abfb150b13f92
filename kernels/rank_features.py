"""What a rank head reads of a distribution: the log probabilities of the top ranks, how far the first stands out, and
how broad the rest is,

    logs_1..10 = top scores - lse,   gaps = logs_1 - logs_(2, 3, 5),   exp(logs_1),   entropy = lse - sum_v q(v) z(v)

with z the scores, lse their log sum exp and q = exp(z - lse)."""

import torch
from torch import Tensor

TOP = 10
"""Number of ranks that have features."""

GAPS = (1, 2, 4)
"""Ranks, from 0, whose distance to the first is a feature."""

NUM_FEATURES = TOP + len(GAPS) + 2


def rank_features(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The features, and the ids of ranks 1..TOP; equal scores may come in any order.
    # scores [..., vocab] -> [..., NUM_FEATURES] float32, [..., TOP] int64"""
    scores = scores.float()
    top = scores.topk(TOP, dim=-1)
    total = scores.logsumexp(-1, keepdim=True)
    logs = top.values - total  # [..., TOP]
    gaps = logs[..., :1] - torch.stack([logs[..., rank] for rank in GAPS], dim=-1)
    entropy = total - (scores.softmax(-1) * scores).sum(-1, keepdim=True)
    return torch.cat([logs, gaps, logs[..., :1].exp(), entropy], dim=-1), top.indices
