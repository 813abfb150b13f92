"""What a copied node is worth: buckets of evidence, and how often nodes of each bucket come true.

The evidence is where the copy was found, how long the longest match behind it is, how many matches vote for it,
which share of its parent's weight it carries, how deep it stands, and whether tokens are sampled. Knows neither
tokens nor sequences.
Legend: batch, matches, depth as in drafters/lookup/matching.py.
"""

import torch
from torch import Tensor

from drafters.lookup.history import CONTEXT
from drafters.lookup.matching import Matches
from drafters.lookup.merging import MergedTree
from drafters.survival import AcceptanceTable
from drafters.tree import MAX_DEPTH

_SUPPORT_EDGES = (1.5, 2.5, 4.5, 8.5, 15.5)  # equal tokens
_SHARE_EDGES = (0.1, 0.3, 0.6, 0.9, 0.99)  # of the parent's weight
_VOTE_EDGES = (1.5, 2.5, 5.5)  # matches
_DEPTH_EDGES = (0.5, 2.5, 7.5)  # nodes above

# Log-odds of the prior, summed over the kinds of evidence. Fitted by logistic regression on 239,000 labels: greedy and
# sampled answers of SmolLM2-135M-Instruct to 306 prompts of eight tasks (log loss 0.265, 0.66 for a constant).
_SUPPORT_LOGITS = (-0.84, -0.30, -0.04, 0.21, 0.49, 1.26)
_SHARE_LOGITS = (-2.20, -1.02, -0.26, 0.76, 1.31, 2.20)
_VOTE_LOGITS = (-0.93, -0.13, 0.56, 1.27)
_DEPTH_LOGITS = (-0.38, -0.09, 0.36, 0.90)
# A client that sends a prediction knows more than a text that happens to repeat itself; the table corrects it soon.
_PREDICTED_LOGIT = 2.0
_SAMPLED_LOGIT = -0.6  # at a temperature above 0 texts repeat themselves less

_SHARE_STRIDE = len(_VOTE_LOGITS) * len(_DEPTH_LOGITS)

_SAMPLED_STRIDE = 2 * len(_SUPPORT_LOGITS) * len(_SHARE_LOGITS) * _SHARE_STRIDE

ABSENT = 2 * _SAMPLED_STRIDE
"""Bucket of what is no node; what it learns means nothing."""

_PRIOR_WEIGHT = 20.0  # labels
_DECAY = 0.998  # per step: memory of about 500 steps
_LIMITS = (0.01, 0.98)
"""Rates stay inside: below 1 so that survival falls strictly, and high enough that a long path does not underflow."""


class LookupOdds:
    """The acceptance table of copied nodes."""

    def __init__(self, *, device: torch.device | str) -> None:
        logits = _prior_logits()
        tried = torch.full_like(logits, _PRIOR_WEIGHT)
        self._table = AcceptanceTable(
            (logits.sigmoid() * tried).to(device), tried.to(device), decay=_DECAY, limits=_LIMITS
        )
        self._share_edges = torch.tensor(_SHARE_EDGES, device=device)
        self._vote_edges = torch.tensor(_VOTE_EDGES, device=device)
        self._strength_part = _strength_part().to(device)
        self._depth_part = _bucket_of(MAX_DEPTH, _DEPTH_EDGES)[:, None].to(device)

    def buckets(self, matches: Matches, tree: MergedTree, temperatures: Tensor) -> Tensor:
        """Flat bucket of each node. # temperatures [batch] -> [batch, depth, matches] int64"""
        matched = self._strength_part[matches.strengths] + _SAMPLED_STRIDE * (temperatures > 0)[:, None]
        places = matched[:, None] + self._depth_part
        places.add_(torch.bucketize(tree.share, self._share_edges), alpha=_SHARE_STRIDE)
        return places.add_(torch.bucketize(tree.votes, self._vote_edges), alpha=len(_DEPTH_LOGITS))

    def rate(self, buckets: Tensor) -> Tensor:
        """Odds that a node is accepted when its parent is. # [...] float32"""
        return self._table.rate(buckets)

    def observe(self, buckets: Tensor, accepted: Tensor, mask: Tensor) -> None:
        """Learn from nodes whose fate is known."""
        self._table.observe(buckets, accepted, mask)


def _prior_logits() -> Tensor:
    evidence = (
        (0.0, _SAMPLED_LOGIT),
        (0.0, _PREDICTED_LOGIT),
        _SUPPORT_LOGITS,
        _SHARE_LOGITS,
        _VOTE_LOGITS,
        _DEPTH_LOGITS,
    )
    logits = torch.zeros(1)
    for weights in evidence:
        logits = (logits[:, None] + torch.tensor(weights)).flatten()
    return torch.cat([logits, torch.zeros(1)])  # the last one is ABSENT's


def _strength_part() -> Tensor:
    """What a match's strength contributes to the bucket. # [NUM_STRENGTHS] int64"""
    support = _bucket_of(CONTEXT + 1, _SUPPORT_EDGES)
    return torch.cat([support, support + len(_SUPPORT_LOGITS)]) * len(_SHARE_LOGITS) * _SHARE_STRIDE


def _bucket_of(values: int, edges: tuple[float, ...]) -> Tensor:
    return torch.bucketize(torch.arange(float(values)), torch.tensor(edges))
