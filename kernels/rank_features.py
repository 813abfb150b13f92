"""What a rank head reads of a distribution, and the loss that drafters' heads are trained on.

Features: the top ranks' log probabilities, how far the first stands out, and how broad the rest is,

    logs_1..10 = top scores - lse,   gaps = logs_1 - logs_(2, 3, 5),   exp(logs_1),   entropy = lse - sum_v q(v) z(v)

with z the scores, lse their log sum exp and q = exp(z - lse).

Loss: distance to the target, and to the anchor drafter,

    loss = mean_r sum_v p_rv (log p_rv - log q_rv)  +  anchor_weight * mean_r sum_v q_rv (log q_rv - log a_rv)

with q = softmax(states head^T), a = softmax(states anchor_head^T), and p the target's likeliest tokens, as far as they
can be drafted. The rank head is trained in the same step, so its features are computed here: of `ranked`, the scores
by which tokens are ranked where the drafter serves.
Legend: rows = positions, vocab = the drafter's, top = likeliest tokens of the target that are kept."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

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


class DraftLoss(NamedTuple):
    """The loss, its two terms, and what the rank head reads. Only `total` has a gradient, by the head."""

    total: Tensor  # []
    target: Tensor  # []
    anchor: Tensor  # []
    features: Tensor  # [rows, rank_features.NUM_FEATURES] float32
    ids: Tensor  # [rows, rank_features.TOP] int64


Ranked = Callable[[Tensor, slice], Tensor]
"""The scores of some rows, up to a constant for each. # logits [those rows, vocab] -> the same"""

HeadLoss = Callable[[Tensor], DraftLoss]
"""The loss of a head. # head [vocab, hidden]"""


def unchanged(logits: Tensor, _: slice) -> Tensor:
    """The logits themselves, by which tokens rank at temperature 0. # [rows, vocab]"""
    return logits


def draft_objective(
    states: Tensor,
    anchor_head: Tensor,
    drafted: Tensor,
    top_logprobs: Tensor,
    *,
    anchor_weight: float,
    ranked: Ranked = unchanged,
) -> HeadLoss:
    """The loss as a function of the head, for several steps on the same rows. # states [rows, hidden]; anchor_head
    [vocab, hidden]; drafted [rows, top] draft ids or -1, none twice in a row; top_logprobs [rows, top]"""
    with torch.no_grad():
        log_a = linear(states, anchor_head).float().log_softmax(-1)  # [rows, vocab]

    def loss(head: Tensor) -> DraftLoss:
        log_q = linear(states, head).float().log_softmax(-1)
        target = target_divergence(log_q, drafted, top_logprobs)
        anchor = (log_q.exp() * (log_q - log_a)).sum(-1).mean()
        features, ids = rank_features(ranked(log_q.detach(), slice(None)))
        return DraftLoss(target + anchor_weight * anchor, target.detach(), anchor.detach(), features, ids)

    return loss


def target_divergence(log_q: Tensor, drafted: Tensor, top_logprobs: Tensor) -> Tensor:
    """mean_r sum_v p_rv (log p_rv - log q_rv), v over the target's top tokens that can be drafted.
    # log_q [rows, vocab]; drafted [rows, top] draft ids or -1; top_logprobs [rows, top] -> scalar []"""
    log_p = top_logprobs.float()
    p = log_p.exp() * (drafted >= 0)
    top_log_q = log_q.gather(1, drafted.clamp(min=0))
    return torch.where(drafted >= 0, p * (log_p - top_log_q), 0.0).sum(1).mean()
