"""Turns continuations into one tree: equal beginnings become one node, and each node learns who stands behind it.

A node is named by (depth, match) of the first match whose continuation runs through it: matches come best first,
so that this is also the best one. Knows no odds.
Legend: batch, matches, depth as in drafters/lookup/matching.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.lookup.history import SEPARATOR
from drafters.lookup.matching import Matches
from drafters.tree import MAX_DEPTH, ROOT

# Weights are powers of two: one for each equal token, less for each place down the list (0.8 = 2^-0.32).
_RANK_PENALTY = 0.32
_PREDICTED_BONUS = 2.0


@dataclass(frozen=True, slots=True)
class MergedTree:
    """All continuations as nodes (depth, match), each field [batch, depth, matches]."""

    exists: Tensor  # bool, first match to run through this node
    parents: Tensor  # int64, flat (depth, match) index of the parent, ROOT below the root
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
        self._penalty = _RANK_PENALTY * self._order
        self._row_above = torch.arange(-1, MAX_DEPTH - 1, device=device)[1:, None] * max_matches

    def merge(self, matches: Matches) -> MergedTree:
        """The tree of these matches' continuations."""
        beginnings = (matches.continuations * self._factors).cumsum(1)
        same = beginnings[:, :, :, None] == beginnings[:, :, None]  # [batch, depth, matches, other matches]
        first = same.view(torch.uint8).argmax(3)  # [batch, depth, matches]
        weights = self._weights(matches)
        sums = same.flatten(1, 2).float() @ torch.stack([weights, (matches.lengths > 0).float()], dim=2)
        through, votes = sums.view(*first.shape, 2).unbind(3)  # [batch, depth, matches]
        return MergedTree(
            exists=(first == self._order) & (matches.continuations != SEPARATOR),
            parents=self._parents(first),
            share=through / _parents_weight(through, weights),
            votes=votes,
        )

    def _weights(self, matches: Matches) -> Tensor:
        """Longer matches count more, and among equals the ones that matching put first. # [batch, matches]"""
        powers = matches.lengths - self._penalty + _PREDICTED_BONUS * matches.predicted
        return powers.exp2() * (matches.lengths > 0)

    def _parents(self, first: Tensor) -> Tensor:
        parents = torch.full_like(first, ROOT)
        torch.add(first[:, :-1], self._row_above, out=parents[:, 1:])
        return parents


def _parents_weight(through: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum(1)[:, None, None].expand(-1, 1, weights.shape[1])
    return torch.cat([total, through[:, :-1]], dim=1).clamp_(min=1e-9)
