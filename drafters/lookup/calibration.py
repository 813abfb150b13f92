"""Turns continuations into one tree, and says how often nodes with such evidence come true. Equal beginnings become one
node, named by (depth, match) of the first, hence strongest, match whose continuation runs through it.
Legend: batch, matches, depth as in drafters/lookup/matching.py."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.calibration import HitTable
from drafters.lookup.matching import CONTEXT, NUM_STRENGTHS, PREDICTED, REACH, SEPARATOR, Matches
from drafters.tree import ROOT, prefix_hashes

# A match weighs twice as much for each equal token, and 0.8 times for each match before it.
_RANK_FACTOR = 0.8
_PREDICTED_FACTOR = 4.0
_NO_MATCH = 2.0**-60  # weighs nothing, yet can be divided by

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


@dataclass(frozen=True, slots=True)
class MergedTree:
    """All continuations as nodes (depth, match), each field [batch, depth, matches]."""

    first: Tensor  # int64, the match whose node this is: the first with the same beginning
    absent: Tensor  # bool, no node: an earlier match runs through it, or the continuation has ended
    parents: Tensor  # int64, flat (depth, match) index of the parent, ROOT below the root
    share: Tensor  # float32, part of the parent's weight that goes on through this node
    votes: Tensor  # float32, how many matches run through this node


class Merger:
    """Merges equal beginnings, found by their hashes."""

    def __init__(self, max_matches: int, *, device: torch.device | str) -> None:
        self._order = torch.arange(max_matches, device=device)
        self._row_above = torch.arange(REACH - 1, device=device)[:, None] * max_matches
        self._strength_weights = _strength_weights().to(device)
        # One column of weights to fill in, one that counts.
        self._rank_weights = torch.stack([_RANK_FACTOR**self._order, torch.ones(max_matches, device=device)], dim=1)

    def merge(self, matches: Matches) -> MergedTree:
        """The tree of these matches' continuations."""
        continuations = matches.continuations[:, :-1]
        beginnings = prefix_hashes(continuations)
        same = beginnings[:, :, :, None] == beginnings[:, :, None]  # [batch, depth, matches, other matches]
        first = same.view(torch.uint8).argmax(3)  # [batch, depth, matches]
        weights = self._strength_weights[matches.strengths] * self._rank_weights  # [batch, matches, 2]
        through, votes = (same.flatten(1, 2).float() @ weights).view(*first.shape, 2).unbind(3)
        total = weights[:, None, :, 0].sum(2, keepdim=True).expand(-1, 1, first.shape[2])
        return MergedTree(
            first=first,
            absent=(first != self._order) | (continuations == SEPARATOR),
            parents=pad(first[:, :-1] + self._row_above, (0, 0, 1, 0), value=ROOT),
            share=through / torch.cat([total, through[:, :-1]], dim=1),
            votes=votes.contiguous(),
        )


def _strength_weights() -> Tensor:
    """Weight of a match by strength, and 1 in the column that counts. # [NUM_STRENGTHS, 2]"""
    lengths = torch.arange(CONTEXT + 1).float()
    weights = torch.cat([lengths.exp2(), _PREDICTED_FACTOR * lengths.exp2()])
    weights[0] = weights[PREDICTED] = _NO_MATCH
    return torch.stack([weights, torch.ones(NUM_STRENGTHS)], dim=1)


class LookupCalibration(HitTable):
    """Acceptance rates of copied nodes, given that their parents are accepted."""

    def __init__(self, *, device: torch.device | str) -> None:
        logits = _prior_logits()
        tried = torch.full_like(logits, _PRIOR_WEIGHT)
        super().__init__((logits.sigmoid() * tried).to(device), tried.to(device), decay=_DECAY, limits=_LIMITS)
        self._share_edges = torch.tensor(_SHARE_EDGES, device=device)
        self._vote_edges = torch.tensor(_VOTE_EDGES, device=device)
        self._strength_part = _strength_part().to(device)
        self._depth_part = _bucket_of(REACH, _DEPTH_EDGES)[:, None].to(device)

    def buckets(self, matches: Matches, tree: MergedTree, temperatures: Tensor) -> Tensor:
        """Flat bucket of each node. # temperatures [batch] -> [batch, depth, matches] int64"""
        matched = self._strength_part[matches.strengths] + _SAMPLED_STRIDE * (temperatures > 0)[:, None]
        places = matched[:, None] + self._depth_part
        places.add_(torch.bucketize(tree.share, self._share_edges), alpha=_SHARE_STRIDE)
        return places.add_(torch.bucketize(tree.votes, self._vote_edges), alpha=len(_DEPTH_LOGITS))


def _prior_logits() -> Tensor:
    sampled, predicted = (0.0, _SAMPLED_LOGIT), (0.0, _PREDICTED_LOGIT)
    logits = torch.zeros(1)
    for weights in (sampled, predicted, _SUPPORT_LOGITS, _SHARE_LOGITS, _VOTE_LOGITS, _DEPTH_LOGITS):
        logits = (logits[:, None] + torch.tensor(weights)).flatten()
    return torch.cat([logits, torch.zeros(1)])  # the last one is ABSENT's


def _strength_part() -> Tensor:
    """What a match's strength contributes to the bucket. # [NUM_STRENGTHS] int64"""
    support = _bucket_of(CONTEXT + 1, _SUPPORT_EDGES)
    return torch.cat([support, support + len(_SUPPORT_LOGITS)]) * len(_SHARE_LOGITS) * _SHARE_STRIDE


def _bucket_of(values: int, edges: tuple[float, ...]) -> Tensor:
    return torch.bucketize(torch.arange(float(values)), torch.tensor(edges))
