"""The lookup drafter: copies what followed the same words earlier in the prompt, the answer so far, or the answer the
client predicted, and proposes several such continuations as one tree. It learns from every committed token.
Legend: batch; sequences = rows; matches, depth as in drafters/lookup/matching.py; nodes = max_nodes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.calibration import MIN_SURVIVAL
from drafters.lookup.calibration import ABSENT, LookupCalibration, Merger
from drafters.lookup.matching import PREDICTED, REACH, SEPARATOR, History, Matcher
from drafters.proposals import Field, ProposalLog
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise
from drafters.tree import ROOT, Candidates, DraftTree, renumbered

_MAX_MATCHES = 12
_SURE = 3
"""Equal tokens from which on a match in the prediction tells where in it the answer is."""


class LookupDrafter(Drafter):
    """Drafts by copying; keeps the texts and the last proposals of all rows on the device."""

    name = "lookup"

    def __init__(self, sizes: DraftingSizes) -> None:
        device = sizes.device
        self._history = History(sizes.max_sequences, sizes.max_length, device)
        self._matcher = Matcher(self._history, _MAX_MATCHES, device=device)
        self._merger = Merger(_MAX_MATCHES, device=device)
        self._calibration = LookupCalibration(device=device)
        self._ranks = torch.arange(min(sizes.max_nodes, REACH * _MAX_MATCHES), device=device)
        self._ahead = torch.arange(REACH + 1, device=device)[:, None]
        self._depth_of = (self._ahead[:-1] + 1).expand(-1, _MAX_MATCHES).flatten()
        fields = {
            "tokens": Field((REACH + 1, _MAX_MATCHES), SEPARATOR),
            "buckets": Field((REACH, _MAX_MATCHES), ABSENT, forgotten=True),
            "strengths": Field((_MAX_MATCHES,), 0, forgotten=True),
        }
        self._proposals = ProposalLog(sizes, fields)
        self._predicted = torch.zeros(sizes.max_sequences, dtype=torch.int64, device=device)
        self._has_proposed = False  # since the last commit: without, there is nothing to learn from the next one

    def start(self, contexts: Sequence[DraftContext]) -> None:
        self._history.start(contexts)
        rows = torch.tensor([context.row for context in contexts], dtype=torch.int64, device=self._predicted.device)
        self._proposals.forget(rows)
        self._predicted[rows] = 0

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        self._has_proposed = True
        matches = self._matcher.find(rows)
        if self._history.predicted:
            sure = matches.strengths[:, 0] >= PREDICTED + _SURE
            self._history.follow(rows, matches.columns[:, 0], sure)
        tree = self._merger.merge(matches)
        buckets = self._calibration.buckets(matches, tree, noise.temperatures)
        # The rates along a path are those of its nodes, which may stand in other matches' columns.
        rates = self._calibration.ratios[buckets].gather(2, tree.first)
        survival = rates.cumprod_(1).masked_fill_(tree.absent, 0.0)
        buckets.masked_fill_(tree.absent, ABSENT)
        self._proposals.keep(rows, tokens=matches.continuations, buckets=buckets, strengths=matches.strengths)
        return self._likeliest(matches.continuations[:, :-1], tree.parents, survival)

    def commit(self, committed: Committed) -> None:
        if self._has_proposed:
            self._learn(committed)
            self._has_proposed = False
        self._history.append(committed.rows, committed.tokens, committed.counts)

    def finish(self, rows: Sequence[int]) -> list[int]:
        self._history.finish(rows)
        predicted: list[int] = self._predicted[list(rows)].tolist()  # planned transfer
        return predicted

    def _learn(self, committed: Committed) -> None:
        rows = committed.rows
        tokens = committed.tokens[:, : REACH + 1]  # another drafter's tree may have been accepted further
        depth = tokens.shape[1]
        known = self._ahead[:depth] < committed.counts[:, None, None]  # [batch, depth + 1, 1]
        # Where both are padding they are equal, but nothing is known there.
        came_true = (self._proposals["tokens"][rows, :depth] == tokens[:, :, None]).cumprod(1).bool()
        predicted = came_true & known & (self._proposals["strengths"][rows] >= PREDICTED)[:, None]
        self._predicted[rows] += predicted.any(2).sum(1)
        came_true, known = came_true[:, :REACH], known[:, :REACH]
        tried = known.expand_as(came_true).clone()
        tried[:, 1:] &= came_true[:, :-1]
        self._calibration.observe(self._proposals["buckets"][rows, : tried.shape[1]], came_true & tried, tried)
        self._proposals.forget(rows)

    def _likeliest(self, tokens: Tensor, parents: Tensor, survival: Tensor) -> Candidates:
        """The likeliest nodes, by falling survival: strictly so along a path, hence parents come first.
        # all [batch, depth, matches]"""
        # Many nodes share a bucket and hence their rate: a stable sort puts the stronger match first.
        order = survival.flatten(1).sort(dim=1, descending=True, stable=True)
        survival, chosen = (ordered[:, : len(self._ranks)] for ordered in order)
        num_nodes = (survival >= MIN_SURVIVAL).sum(1)
        padding = self._ranks >= num_nodes[:, None]
        return DraftTree(
            tokens=tokens.flatten(1).gather(1, chosen).masked_fill_(padding, 0),
            parents=renumbered(parents.flatten(1), chosen).masked_fill_(padding, ROOT),
            depths=self._depth_of[chosen].masked_fill_(padding, 0),
            survival=survival.masked_fill_(padding, 0.0),
            num_nodes=num_nodes,
        )
