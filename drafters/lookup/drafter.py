"""The lookup drafter: copies what followed the same words earlier in the prompt, the answer so far, or the answer
the client predicted, and proposes several such continuations as one tree.

It learns how far each kind of copy can be trusted, from every committed token: the fate of a continuation is known
as soon as the text goes on, whether or not it was verified. Deterministic; temperature and seed do not matter to it.
Legend: batch; sequences = rows; matches, depth as in drafters/lookup/matching.py; nodes = max_nodes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from drafters.lookup.history import SEPARATOR, History
from drafters.lookup.matching import Matcher, Matches
from drafters.lookup.merging import MergedTree, Merger
from drafters.lookup.odds import LookupOdds
from drafters.protocol import Committed, DraftContext, Noise
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree

_MAX_MATCHES = 12
_SURE = 3
"""Equal tokens from which on a match in the prediction tells where in it the answer is."""

_MIN_SURVIVAL = 0.02
"""Candidates less likely than this never pay: a node costs more than 1/50 of a step on any machine."""


class LookupDrafter:
    """Drafts by copying; keeps the texts and the last proposals of `max_sequences` rows on the device."""

    name = "lookup"
    version = 0

    def __init__(self, *, max_sequences: int, max_length: int, max_nodes: int, device: torch.device | str) -> None:
        self._history = History(max_sequences, max_length, device)
        self._matcher = Matcher(self._history, _MAX_MATCHES, device=device)
        self._merger = Merger(_MAX_MATCHES, device=device)
        self._odds = LookupOdds(_MAX_MATCHES, device=device)
        self._ranks = torch.arange(min(max_nodes, MAX_DEPTH * _MAX_MATCHES), device=device)
        shape = (max_sequences, MAX_DEPTH, _MAX_MATCHES)
        self._proposed = torch.full(shape, SEPARATOR, dtype=torch.int32, device=device)
        self._buckets = torch.zeros(shape, dtype=torch.int64, device=device)
        self._is_node = torch.zeros(shape, dtype=torch.bool, device=device)
        self._predicted = torch.zeros(max_sequences, _MAX_MATCHES, dtype=torch.bool, device=device)
        self._foretold = torch.zeros(max_sequences, dtype=torch.int64, device=device)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return ()

    def start(self, contexts: Sequence[DraftContext]) -> None:
        self._history.start(contexts)
        rows = torch.tensor([context.row for context in contexts], device=self._foretold.device)
        self._drop_proposals(rows)
        self._foretold[rows] = 0

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        matches = self._matcher.find(rows)
        if self._history.has_predictions:
            self._follow_prediction(rows, matches)
        tree = self._merger.merge(matches)
        buckets = self._odds.buckets(matches, tree)
        self._remember(rows, matches, tree, buckets)
        survival = self._odds.rate(buckets).cumprod_(1).mul_(tree.exists)
        return self._likeliest(matches.continuations, tree.parents, survival)

    def commit(self, committed: Committed) -> None:
        self._learn(committed)
        self._history.append(committed.rows, committed.tokens, committed.counts)

    def finish(self, rows: Sequence[int]) -> list[int]:
        self._history.finish(rows)
        foretold: list[int] = self._foretold[list(rows)].tolist()
        return foretold

    def trainable(self) -> nn.Module | None:
        return None

    def _follow_prediction(self, rows: Tensor, matches: Matches) -> None:
        sure = matches.predicted[:, 0] & (matches.lengths[:, 0] >= _SURE)
        self._history.follow(rows, matches.columns[:, 0], sure)

    def _remember(self, rows: Tensor, matches: Matches, tree: MergedTree, buckets: Tensor) -> None:
        self._proposed[rows] = matches.continuations
        self._predicted[rows] = matches.predicted
        self._buckets[rows] = buckets
        self._is_node[rows] = tree.exists

    def _learn(self, committed: Committed) -> None:
        rows = committed.rows
        depth = min(MAX_DEPTH, committed.tokens.shape[1])
        proposed = self._proposed[rows, :depth]  # [batch, depth, matches]
        # The padding of what was committed equals that of the proposals: it comes true, but is no node.
        came_true = (proposed == committed.tokens[:, :depth, None]).cumprod(1).bool()
        known = self._ranks_below(depth, committed.counts)
        tried = self._is_node[rows, :depth] & known
        tried[:, 1:] &= came_true[:, :-1]
        self._odds.observe(self._buckets[rows, :depth], came_true, tried)
        foretold = came_true & known & self._predicted[rows][:, None]
        self._foretold[rows] += foretold.any(2).sum(1)
        self._drop_proposals(rows)

    def _drop_proposals(self, rows: Tensor) -> None:
        """Without drafting in between, what the next step commits must not be taken for the fate of old proposals."""
        self._is_node[rows] = False
        self._predicted[rows] = False

    def _likeliest(self, tokens: Tensor, parents: Tensor, survival: Tensor) -> Candidates:
        """The likeliest nodes, by falling survival: strictly so along a path, hence parents come first.

        All three [batch, depth, matches].
        """
        best = survival.flatten(1).topk(len(self._ranks), dim=1)
        num_nodes = (best.values >= _MIN_SURVIVAL).sum(1)
        valid = self._ranks < num_nodes[:, None]
        return DraftTree(
            tokens=tokens.flatten(1).gather(1, best.indices).long() * valid,
            parents=self._renumbered(parents.flatten(1), best.indices).masked_fill_(~valid, ROOT),
            depths=(best.indices // _MAX_MATCHES + 1) * valid,
            survival=best.values * valid,
            num_nodes=num_nodes,
        )

    def _renumbered(self, parents: Tensor, chosen: Tensor) -> Tensor:
        """Parents of the chosen nodes in the new numbers. # parents [batch, depth * matches], chosen [batch, nodes]"""
        # The extra first column stands for the root, whose index is -1.
        numbers = parents.new_full((parents.shape[0], parents.shape[1] + 1), ROOT)
        numbers.scatter_(1, chosen + 1, self._ranks.expand_as(chosen))
        return numbers.gather(1, parents.gather(1, chosen) + 1)

    def _ranks_below(self, depth: int, counts: Tensor) -> Tensor:
        ahead = torch.arange(depth, device=counts.device)
        return (ahead < counts[:, None])[:, :, None]  # [batch, depth, 1]
