"""The loss by which a drafter's output layers learn while serving, from positions that the target has verified.
Legend: rows = draft labels, vocab = the drafter's, classes = some of it, top = likeliest tokens of the target."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from drafters.coupling import TreeNoise
from drafters.feedback import DraftLabels
from drafters.network.heads import rank_class, rank_features
from drafters.network.model import SpecBlock

OUTPUT_LAYERS = ("lm_head.weight", "rank_head.2.weight")
"""Names of the parameters that are trained."""

_LIKELY = 16  # target tokens per row; with 64 the loss is the same within 1 %, and has twice as many classes
_DAMPING = 0.3  # in mean squared norms of a row: a single row moves its logits by three quarters of the step
_DRAFT_RATE = 4.0
"""Step size for the draft head. Larger steps diverge, as the curvature of a softmax is at most a half; for unlikely
tokens, with almost no curvature, even this one stops short of the minimum. The rank head has likely classes, and step
size 1."""


def anchor_divergence(logits: Tensor, anchor_logits: Tensor) -> Tensor:
    """Return the mean over rows of KL(drafter || anchor), in nats. # both [rows, vocab] -> scalar"""
    log_q, log_a = logits.float().log_softmax(-1), anchor_logits.float().log_softmax(-1)
    return (log_q.exp() * (log_q - log_a)).sum(-1).mean()


def target_divergence(log_q: Tensor, places: Tensor, top_logprobs: Tensor) -> Tensor:
    """Return the mean over rows of sum_v p_v (log p_v - log q_v), v over the target's top tokens that can be drafted.
    # log_q [rows, classes]; places [rows, top] among the classes, or -1; top_logprobs [rows, top] -> scalar"""
    log_p = top_logprobs.float()
    apart = log_p.exp() * (log_p - log_q.gather(1, places.clamp(min=0)))
    return apart.where(places >= 0, 0.0).sum(1).mean()


def newton_logits(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return logits of an output layer whose gradient is a damped Newton step in the space of these rows,

        dW = ((H H^T + damping 1)^-1 dL/dlogits)^T H,    H = inputs,

    which moves the logits of each row by their own error, however similar the rows are. One step equals many of a
    first-order method, without optimizer moments. # inputs [rows, width], weight [classes, width] -> [rows,
    classes] float32"""
    with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
        products = inputs.float() @ inputs.float().T
        damping = _DAMPING * products.diagonal().mean() * torch.eye(len(inputs), device=inputs.device)
        factor = torch.linalg.cholesky_ex(products + damping).L
    logits = linear(inputs, weight).float()
    logits.register_hook(lambda gradient: torch.cholesky_solve(gradient, factor))
    return logits


def head_loss(
    model: SpecBlock,
    anchor_head: Tensor,
    labels: DraftLabels,
    ranked: DraftLabels,
    noise: TreeNoise,
    *,
    anchor_weight: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of the output layers, whose gradient is the step to take, and its terms by name (means over
    rows).

    The draft head learns from `labels`, only in the rows of tokens that the target finds likely at any of them. The
    rank head learns from `ranked`, with features of the current draft head's scores and, as in serving, with the
    sampling `noise` of each label's position. # anchor_head [vocab, hidden] -> scalars"""
    ids, states = model.t2d[labels.top_ids[:, :_LIKELY].long()], labels.states.float()
    classes, places = ids.clamp(min=0).unique(return_inverse=True)
    logits = newton_logits(states, model.lm_head.weight[classes])
    draft = target_divergence(logits.log_softmax(-1), places.where(ids >= 0, -1), labels.top_logprobs[:, :_LIKELY])
    anchor = anchor_divergence(logits, linear(states, anchor_head[classes]))
    rank = _rank_loss(model, ranked, noise)
    drafts = (draft + anchor_weight * anchor) / (1 + anchor_weight)
    loss = _DRAFT_RATE * labels.count * drafts + ranked.count * rank
    return loss, {"draft": draft, "rank": rank, "anchor": anchor}


def _rank_loss(model: SpecBlock, labels: DraftLabels, noise: TreeNoise) -> Tensor:
    """Return the rank head's cross-entropy, with a gradient for its last layer only. # -> scalar"""
    states, last = labels.states.float(), model.get_parameter(OUTPUT_LAYERS[1])
    with torch.no_grad():
        scores = noise.along(linear(states, model.lm_head.weight)[:, None])[:, 0]
        features, ids = rank_features(scores, model.traits.rank_head.scores)
        inputs = model.rank_inputs(states, features)
        others = model.rank_logits(states, features) - linear(inputs, last).float()
    return cross_entropy(others + newton_logits(inputs, last), rank_class(ids, model.t2d[labels.tokens]))
