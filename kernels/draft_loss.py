"""What a drafter's head is trained on in an update: distance to the target, and to the anchor drafter.

    loss = mean_r sum_v p_rv (log p_rv - log q_rv)  +  anchor_weight * mean_r sum_v q_rv (log q_rv - log a_rv)

with q = softmax(states head^T), a = softmax(states anchor_head^T), and p the target's likeliest tokens, as far as they
can be drafted. The rank head is trained in the same step, so its features are computed here: on `ranked`, the scores
by which tokens are ranked where the drafter serves.
Legend: rows = positions, vocab = the drafter's, top = likeliest tokens of the target that are kept."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.rank_features import rank_features


class DraftLoss(NamedTuple):
    """The loss, what it is made of, and what the rank head sees. Only `total` has a gradient, by the head."""

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
    """At temperature 0 tokens are ranked by their logits."""
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
    """The loss of the heads of several steps on the same rows. # states [rows, hidden]; anchor_head [vocab,
    hidden]; drafted [rows, top] draft ids or -1, none twice in a row; top_logprobs [rows, top]"""
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
    """Mean over rows of sum_v p(v) (log p(v) - log q(v)), v over the target's top tokens that can be drafted."""
    log_p = top_logprobs.float()
    p = log_p.exp() * (drafted >= 0)
    its_log_q = log_q.gather(1, drafted.clamp(min=0))
    return torch.where(drafted >= 0, p * (log_p - its_log_q), 0.0).sum(1).mean()
