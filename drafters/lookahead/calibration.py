"""How often what n-grams and guesses say comes true, by evidence: how long the context is, how much of what was seen
behind it agrees, how often and how lately, whether the guess for the position agrees, how deep the node."""

import torch
from torch import Tensor

from drafters.calibration import HitTable
from kernels.ngrams import ORDERS, NgramEvidence

LEVELS = 8
"""Depth of a tree."""

_SHARE_EDGES = (0.3, 0.6, 0.95)  # of what was seen behind the context
_COUNT_EDGES = (0.99, 1.99)
_DEPTH_EDGES = (0.5, 2.5)  # nodes above

assert len(ORDERS) == 3, "kinds are by own order and longest known one; the last is a guess that nothing else says"
# Log-odds of the prior, summed over the kinds of evidence. Fitted by logistic regression on 6,000 labels: greedy and
# sampled answers of SmolLM2-135M-Instruct to 24 prompts of three tasks (log loss 0.36, 0.51 for a constant).
_KIND_LOGITS = (1.70, 0.0, 0.0, -0.64, 0.75, 0.0, -1.49, -0.54, -0.16, 0.09)
_SHARE_LOGITS = (-0.40, -0.49, -0.02, 0.61)
_COUNT_LOGITS = (-0.52, -0.05, 0.27)
_LATEST_LOGITS = (-0.68, 0.38)
_AGREES_LOGITS = (-1.02, 0.72)
_DEPTH_LOGITS = (-0.06, -0.19, -0.04)
_SAMPLED_LOGITS = (-0.03, -0.27)

# Outermost first.
_ALL_LOGITS = (
    _SAMPLED_LOGITS,
    _KIND_LOGITS,
    _SHARE_LOGITS,
    _COUNT_LOGITS,
    _LATEST_LOGITS,
    _AGREES_LOGITS,
    _DEPTH_LOGITS,
)

_PRIOR_WEIGHT = 20.0  # labels
_DECAY = 0.998  # per step: memory of about 500 steps
_LIMITS = (0.01, 0.98)  # below 1: survival falls strictly along a path


def _strides() -> tuple[int, ...]:
    strides = [1]
    for logits in reversed(_ALL_LOGITS[1:]):
        strides.insert(0, strides[0] * len(logits))
    return tuple(strides)


_SAMPLED, _KIND, _SHARE, _COUNT, _LATEST, _AGREES, _DEPTH = _strides()

ABSENT = _SAMPLED * len(_SAMPLED_LOGITS)
"""The last bucket, of what is no node; what it learns means nothing."""


class LookaheadCalibration(HitTable):
    """Acceptance rates of proposed successors, given that their contexts are accepted."""

    def __init__(self, device: torch.device | str) -> None:
        logits = _prior_logits()
        tried = torch.full_like(logits, _PRIOR_WEIGHT)
        super().__init__((logits.sigmoid() * tried).to(device), tried.to(device), decay=_DECAY, limits=_LIMITS)
        of_depth = torch.bucketize(torch.arange(float(LEVELS)), torch.tensor(_DEPTH_EDGES)) * _DEPTH
        self.evidence = NgramEvidence(
            rates=self.rates,
            share_edges=torch.tensor(_SHARE_EDGES, device=device),
            count_edges=torch.tensor(_COUNT_EDGES, device=device),
            of_depth=of_depth.to(device),
            sampled=_SAMPLED,
            kind=_KIND,
            share=_SHARE,
            count=_COUNT,
            latest=_LATEST,
            agrees=_AGREES,
        )


def _prior_logits() -> Tensor:
    logits = torch.zeros(1)
    for weights in _ALL_LOGITS:
        logits = (logits[:, None] + torch.tensor(weights)).flatten()
    return torch.cat([logits, torch.zeros(1)])  # the last one is ABSENT's
