"""Turns continuations into one tree: equal beginnings become one node, and each node learns who stands behind it.

A node is named by (depth, match) of the first match whose continuation runs through it: matches come strongest
first, so that this is also the strongest. Knows no odds.
Legend: batch, matches, depth as in drafters/lookup/matching.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.lookup.history import CONTEXT, SEPARATOR
from drafters.lookup.matching import NUM_STRENGTHS, PREDICTED, Matches
from drafters.tree import MAX_DEPTH

# A match weighs twice as much for each equal token, and 0.8 times for each match before it.
_RANK_FACTOR = 0.8
_PREDICTED_FACTOR = 4.0
_NO_MATCH = 2.0**-60  # weighs nothing, yet can be divided by


@dataclass(frozen=True, slots=True)
class MergedTree:
    """All continuations as nodes (depth, match), each field [batch, depth, matches]."""

    first: Tensor  # int64, the match whose node this is: the first with the same beginning
    absent: Tensor  # bool, no node: an earlier match runs through it, or the continuation has ended
    parents: Tensor  # int64, 1 + flat (depth, match) index of the parent, 0 below the root
    share: Tensor  # float32, part of the parent's weight that goes on through this node
    votes: Tensor  # float32, how many matches run through this node


class Merger:
    """Merges equal beginnings, found by a 64-bit sum of tokens times random odd numbers.

    A collision would only draft a wrong token, and has odds of about 2^-64.
    """

    def __init__(self, max_matches: int, *, device: torch.device | str) -> None:
        generator = torch.Generator().manual_seed(1)
        odd = torch.randint(-(2**62), 2**62, (MAX_DEPTH, 1), generator=generator) | 1
        self._factors = odd.to(device)  # [depth, 1]
        self._order = torch.arange(max_matches, device=device)
        self._row_above = torch.arange(MAX_DEPTH - 1, device=device)[:, None] * max_matches + 1
        self._strength_weights = _strength_weights().to(device)
        # One column of weights to fill in, one that counts.
        self._rank_weights = torch.stack([_RANK_FACTOR**self._order, torch.ones(max_matches, device=device)], dim=1)

    def merge(self, matches: Matches) -> MergedTree:
        """The tree of these matches' continuations."""
        continuations = matches.continuations[:, :-1]
        beginnings = (continuations * self._factors).cumsum(1)
        same = beginnings[:, :, :, None] == beginnings[:, :, None]  # [batch, depth, matches, other matches]
        first = same.view(torch.uint8).argmax(3)  # [batch, depth, matches]
        weights = self._strength_weights[matches.strengths] * self._rank_weights  # [batch, matches, 2]
        through, votes = (same.flatten(1, 2).float() @ weights).view(*first.shape, 2).unbind(3)
        total = weights[:, None, :, 0].sum(2, keepdim=True).expand(-1, 1, first.shape[2])
        return MergedTree(
            first=first,
            absent=(first != self._order) | (continuations == SEPARATOR),
            parents=self._parents(first),
            share=through / torch.cat([total, through[:, :-1]], dim=1),
            votes=votes.contiguous(),
        )

    def _parents(self, first: Tensor) -> Tensor:
        parents = torch.zeros_like(first)
        torch.add(first[:, :-1], self._row_above, out=parents[:, 1:])
        return parents


def _strength_weights() -> Tensor:
    """Weight of a match by strength, and 1 in the column that counts. # [NUM_STRENGTHS, 2]"""
    lengths = torch.arange(CONTEXT + 1).float()
    weights = torch.cat([lengths.exp2(), _PREDICTED_FACTOR * lengths.exp2()])
    weights[0] = weights[PREDICTED] = _NO_MATCH
    return torch.stack([weights, torch.ones(NUM_STRENGTHS)], dim=1)
