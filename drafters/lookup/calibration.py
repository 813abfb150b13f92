"""How often copied nodes come true, by evidence: how strong the match is, how many matches agree, how deep the node."""

import torch

from drafters.calibration import HitTable
from kernels.lookup import CONTEXT, PREDICTED, Evidence

REACH = 48
"""Tokens that a match is continued: a copy as long as the default budget of nodes."""

MAX_MATCHES = 12

NUM_STRENGTHS = PREDICTED + CONTEXT + 1

# A match weighs twice as much for each equal token, and 0.8 times for each match before it.
_RANK_FACTOR = 0.8
_PREDICTED_FACTOR = 4.0
_NO_MATCH = 2.0**-60  # weighs nothing, yet can be divided by

_SUPPORT_EDGES = (0.5, 1.5, 2.5, 4.5, 8.5, 15.5)  # equal tokens; none where a prediction is guessed to go on
_SHARE_EDGES = (0.1, 0.3, 0.6, 0.9, 0.99)  # of the parent's weight
_VOTE_EDGES = (1.5, 2.5, 5.5)  # matches
_DEPTH_EDGES = (0.5, 2.5, 7.5)  # nodes above

# Log-odds of the prior, summed over the kinds of evidence. Fitted by logistic regression on 239,000 labels: greedy and
# sampled answers of SmolLM2-135M-Instruct to 306 prompts of eight tasks (log loss 0.265, 0.66 for a constant).
_SUPPORT_LOGITS = (-0.84, -0.84, -0.30, -0.04, 0.21, 0.49, 1.26)
_SHARE_LOGITS = (-2.20, -1.02, -0.26, 0.76, 1.31, 2.20)
_VOTE_LOGITS = (-0.93, -0.13, 0.56, 1.27)
_DEPTH_LOGITS = (-0.38, -0.09, 0.36, 0.90)
# A client that sends a prediction knows more than a text that happens to repeat itself; the table corrects it soon.
_PREDICTED_LOGIT = 2.0
_SAMPLED_LOGIT = -0.6  # at a temperature above 0 texts repeat themselves less

_SHARE_STRIDE = len(_VOTE_LOGITS) * len(_DEPTH_LOGITS)

_SAMPLED_STRIDE = 2 * len(_SUPPORT_LOGITS) * len(_SHARE_LOGITS) * _SHARE_STRIDE

ABSENT = 2 * _SAMPLED_STRIDE
"""The last bucket, of what is no node; what it learns means nothing."""

_PRIOR_WEIGHT = 20.0  # labels
_DECAY = 0.998  # per step: memory of about 500 steps
_LIMITS = (0.01, 0.98)
"""Rates stay inside: below 1 so that survival falls strictly, and high enough that a long path does not underflow."""


class LookupCalibration(HitTable):
    """Acceptance rates of copied nodes, given that their parents are accepted."""

    def __init__(self, *, device: torch.device | str) -> None:
        logits = _prior_logits()
        tried = torch.full_like(logits, _PRIOR_WEIGHT)
        super().__init__((logits.sigmoid() * tried).to(device), tried.to(device), decay=_DECAY, limits=_LIMITS)
        self.evidence = Evidence(
            rates=self.rates,
            weights=_strength_weights().to(device),
            rank_weights=(_RANK_FACTOR ** torch.arange(MAX_MATCHES)).to(device),
            of_strength=_strength_part().to(device),
            of_depth=_bucket_of(REACH, _DEPTH_EDGES).to(device),
            share_edges=torch.tensor(_SHARE_EDGES, device=device),
            vote_edges=torch.tensor(_VOTE_EDGES, device=device),
            sampled=_SAMPLED_STRIDE,
            share=_SHARE_STRIDE,
            votes=len(_DEPTH_LOGITS),
        )


def _strength_weights() -> torch.Tensor:
    """Weight of a match by strength. # [NUM_STRENGTHS] float32"""
    lengths = torch.arange(CONTEXT + 1).float()
    weights = torch.cat([lengths.exp2(), _PREDICTED_FACTOR * lengths.exp2()])
    weights[0] = _NO_MATCH
    return weights


def _prior_logits() -> torch.Tensor:
    sampled, predicted = (0.0, _SAMPLED_LOGIT), (0.0, _PREDICTED_LOGIT)
    logits = torch.zeros(1)
    for weights in (sampled, predicted, _SUPPORT_LOGITS, _SHARE_LOGITS, _VOTE_LOGITS, _DEPTH_LOGITS):
        logits = (logits[:, None] + torch.tensor(weights)).flatten()
    return torch.cat([logits, torch.zeros(1)])  # the last one is ABSENT's


def _strength_part() -> torch.Tensor:
    """What a match's strength contributes to the bucket. # [NUM_STRENGTHS] int64"""
    support = _bucket_of(CONTEXT + 1, _SUPPORT_EDGES)
    return torch.cat([support, support + len(_SUPPORT_LOGITS)]) * len(_SHARE_LOGITS) * _SHARE_STRIDE


def _bucket_of(values: int, edges: tuple[float, ...]) -> torch.Tensor:
    return torch.bucketize(torch.arange(float(values)), torch.tensor(edges))
