"""What a drafter's output layers learn from the positions where the target judged their drafts.
Legend: rows = draft labels, vocab = the drafter's, classes = some of it, top = likeliest tokens of the target."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from drafters.coupling import TreeNoise
from drafters.feedback import DraftLabels
from drafters.specblock.heads import rank_class, rank_features
from drafters.specblock.model import SpecBlock

OUTPUT_LAYERS = ("lm_head.weight", "rank_head.2.weight")
"""The parameters that learn."""

_LIKELY = 16  # of the target's tokens per row; of 64 the loss is the same within 1 %, and has twice as many classes
_DAMPING = 0.3  # in mean squared norms of a row: what a row says alone is believed by three quarters
_DRAFT_RATE = 4.0
"""Steps of a softmax, whose curvature is at most a half, diverge above it; those of unlikely tokens, where there is
next to no curvature, are still short of the minimum. The rank head's classes are likely: it takes steps of 1."""


def anchor_divergence(logits: Tensor, anchor_logits: Tensor) -> Tensor:
    """Mean over rows of KL(drafter || anchor), in nats. # both [rows, vocab] -> scalar"""
    log_q, log_a = logits.float().log_softmax(-1), anchor_logits.float().log_softmax(-1)
    return (log_q.exp() * (log_q - log_a)).sum(-1).mean()


def target_divergence(log_q: Tensor, places: Tensor, top_logprobs: Tensor) -> Tensor:
    """Mean over rows of sum_v p_v (log p_v - log q_v), v over the target's top tokens that can be drafted.
    # log_q [rows, classes]; places [rows, top] among the classes, or -1; top_logprobs [rows, top] -> scalar"""
    log_p = top_logprobs.float()
    apart = log_p.exp() * (log_p - log_q.gather(1, places.clamp(min=0)))
    return apart.where(places >= 0, 0.0).sum(1).mean()


class OutputLayer:
    """An output layer on some rows, whose gradient is a damped Newton step in the space of these rows,

        dW = ((H H^T + damping 1)^-1 dL/dlogits)^T H,    H = the layer's inputs [rows, width],

    which moves the logits of each row by what is wrong with them, however alike the rows are: one such step does what
    takes a first-order method many, and no moments are kept."""

    def __init__(self, inputs: Tensor) -> None:
        """# inputs [rows, width]"""
        with torch.autocast(inputs.device.type, enabled=False):
            products = inputs.float() @ inputs.float().T
        damping = _DAMPING * products.diagonal().mean() * torch.eye(len(inputs), device=inputs.device)
        self._inputs, self._factor = inputs, torch.linalg.cholesky_ex(products + damping).L

    def logits(self, weight: Tensor) -> Tensor:
        """Return the logits. # weight [classes, width] -> [rows, classes]"""
        logits = linear(self._inputs, weight).float()  # under autocast the factor alone is not rounded
        if logits.requires_grad:
            logits.register_hook(lambda gradient: torch.cholesky_solve(gradient, self._factor))
        return logits


class HeadObjective:
    """The loss of a drafter's output layers on a few draft labels; its gradient is the step to take. The draft head's
    classes are the tokens that the target finds likely at any label: all other rows of the head stay. The rank head
    reads features of the draft head as it is now, with the sampling noise of each label's token, as in serving."""

    @torch.no_grad()
    def __init__(
        self,
        model: SpecBlock,
        anchor_head: Tensor,
        labels: DraftLabels,
        ranked: DraftLabels,
        noise: TreeNoise,
        *,
        anchor_weight: float,
    ) -> None:
        """`ranked`: labels that train the rank head; `noise`: of these. # anchor_head [vocab, hidden]"""
        self._model, self._anchor_weight = model, anchor_weight
        ids, states = model.t2d[labels.top_ids[:, :_LIKELY].long()], labels.states.float()
        self._classes, places = ids.clamp(min=0).unique(return_inverse=True)
        self._places, self._top_logprobs = places.where(ids >= 0, -1), labels.top_logprobs[:, :_LIKELY]
        self._draft = OutputLayer(states)
        self._anchor_logits = linear(states, anchor_head[self._classes])
        states = ranked.states.float()
        features, ids = rank_features(noise.along(linear(states, model.lm_head.weight)[:, None])[:, 0])
        self._ranks = rank_class(ids, model.t2d[ranked.tokens])
        inputs = model.rank_inputs(states, features)
        self._rank = OutputLayer(inputs)
        self._constant = model.rank_logits(states, features) - self._rank.logits(self._rank_weight)

    def __call__(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the layers as they are, and its terms by name, means over rows. # scalars"""
        logits = self._draft.logits(self._model.lm_head.weight[self._classes])
        draft = target_divergence(logits.log_softmax(-1), self._places, self._top_logprobs)
        anchor = anchor_divergence(logits, self._anchor_logits)
        rank = cross_entropy(self._constant + self._rank.logits(self._rank_weight), self._ranks)
        drafts = (draft + self._anchor_weight * anchor) / (1 + self._anchor_weight)
        loss = _DRAFT_RATE * len(logits) * drafts + len(self._ranks) * rank
        return loss, {"draft": draft, "rank": rank, "anchor": anchor}

    @property
    def _rank_weight(self) -> nn.Parameter:
        return self._model.get_parameter(OUTPUT_LAYERS[1])
