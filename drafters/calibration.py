"""Calibration of acceptance probabilities, learned while serving: hit rates by bucket (`HitCounts`) with two users.
`SurvivalCalibration` corrects the survival of nodes, by depth and claimed survival; `RankCalibration` corrects a
drafter's predictions for its ranks, by block, position and rank class. A label is a node whose parent was accepted; it
counts its predicted probability as expected, so that rates are correction factors. Labels decay, so that a bucket
without recent labels returns to its prior.
Legend: batch, nodes as in drafters/tree.py; rows = sequences of the engine's table; buckets."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.protocol import DraftingSizes, RankOutcomes
from drafters.tree import Candidates, DraftTree
from kernels import ops
from kernels.lattice import CLASS_OF_RANK, LEAST, members_of_classes
from kernels.survival import CLAIMS, DEPTHS, HitCounts, Proposed

CLASS_NAMES = ("1", "2-4", "5-10")
"""Names of the rank classes that have candidates: the ranks they contain."""

_CLASSES = len(CLASS_NAMES)
_CLAIM_PRIOR, _RANK_PRIOR = 6.0, 30.0  # weight of the prior, that claims and predictions are right, in labels
_CLAIM_DECAY, _RANK_DECAY = 0.99, 0.998  # decay per verified step: about 100 and 500 steps count
_CLAIM_LIMITS, _RANK_LIMITS = (0.01, 2.0), (0.2, 3.0)
_OLD_WEIGHTS = 0.25  # weight of labels from before the drafter's weights were replaced
_BINS = 10  # equal ranges of survival, for the calibration error
_BIN_DECAY = 0.998


class SurvivalCalibration:
    """Correction of the survival that drafters claim for nodes, by depth and claim, learned from verified steps."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        how = {"prior": _CLAIM_PRIOR, "decay": _CLAIM_DECAY}
        self._counts = HitCounts.empty(DEPTHS * CLAIMS, **how, limits=_CLAIM_LIMITS, device=device)
        self._bins = torch.zeros(3, _BINS, device=device)  # sums of nodes, survival and accepted nodes
        self._ops = ops.on(self._bins.device)

    @property
    def rates(self) -> Tensor:
        """Correction factors by depth and claim, for the kernel `correct_survival`. # [DEPTHS * CLAIMS] float32"""
        return self._counts.rates

    def learn(self, trees: DraftTree, claimed: Tensor, buckets: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Learn from verified nodes. # claimed, buckets [batch, nodes], see `Pruned`; tokens [batch, longest], counts
        [batch], see `Committed`"""
        known = trees, claimed, buckets, tokens, counts
        self._ops.count_claims(self._counts, self._bins, _BIN_DECAY, *known)

    def on_weights_changed(self) -> None:
        """Reduce the weight of labels that earlier drafter weights produced."""
        self._counts.fade(_OLD_WEIGHTS)

    def error(self) -> float:
        """Return the expected calibration error of corrected survival over recently verified nodes, 0 without any.
        Waits for the device."""
        nodes, survival, accepted = self._bins
        return float((survival - accepted).abs().sum() / nodes.sum().clamp(min=1.0))  # planned transfer


class RankCalibration:
    """Correction of a drafter's predictions for its ranks, by first or later block, position in it and rank class. A
    node becomes a label once a token is committed after its parent, whether or not the node itself was verified."""

    def __init__(self, block_size: int, sizes: DraftingSizes) -> None:
        how = {"prior": _RANK_PRIOR, "decay": _RANK_DECAY}
        self._counts = HitCounts.empty(2 * block_size * _CLASSES, **how, limits=_RANK_LIMITS, device=sizes.device)
        positions = torch.arange(block_size, device=sizes.device)[:, None] * _CLASSES
        first = positions + torch.tensor(CLASS_OF_RANK, device=sizes.device)  # [block, rank]
        self._first_further = block_size * _CLASSES  # first bucket of the blocks after a tree's first
        self._buckets = torch.stack([first, first + self._first_further])
        # The last row is a dummy for the padding of batches.
        ids = torch.zeros(4, sizes.max_sequences + 1, sizes.max_nodes, dtype=torch.int64, device=sizes.device)
        self.proposed = Proposed(ids[0], ids[1], ids[2], torch.zeros_like(ids[0], dtype=torch.float32), ids[3])
        self._ops = ops.on(ids.device)

    def forget(self, rows: Sequence[int]) -> None:
        """Drop the trees kept for these rows, so that the next committed tokens are not compared with them."""
        for row in rows:  # lists as indices would make the host wait
            self.proposed.depths[row] = 0

    @property
    def rates(self) -> Tensor:
        """Correction factors of conditional probabilities. # [buckets] float32"""
        return self._counts.rates

    def buckets(self, block: int) -> Tensor:
        """Return the bucket of each node of a block, counted from 0. # -> [block, rank] int64"""
        return self._buckets[min(block, 1)]

    def trust(self, block: int) -> Tensor:
        """Return the correction factors of a block's conditional probabilities. # -> [block, rank] float32"""
        return self.rates[self.buckets(block)]

    def keep(self, rows: Tensor, tree: Candidates, chosen: Tensor, predicted: Tensor, buckets: Tensor) -> None:
        """Keep these rows' trees until `learn`. # rows [batch]; chosen [batch, nodes], index of each tree node among
        all predicted nodes; predicted [batch, all nodes], probabilities before correction; buckets [all nodes]"""
        self._ops.keep_proposed(self.proposed, rows, tree, chosen, predicted, buckets)

    def learn(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        """Learn from the tokens committed after the kept trees. # rows, counts [batch]; tokens [batch, depth + 1]
        -> [2] int64: accepted tokens from blocks after a tree's first, and all committed tokens"""
        return self._ops.judge_proposed(self.proposed, self._counts, rows, tokens, counts, self._first_further)

    def outcomes(self) -> RankOutcomes:
        """Return predicted and accepted candidates by rank class, decayed counts. Waits for the device."""
        sums = torch.stack([self._counts.expected, self._counts.came_true]).view(2, -1, _CLASSES).sum(1)
        predicted, right = sums.tolist()  # planned transfer
        return RankOutcomes(dict(zip(CLASS_NAMES, predicted, strict=True)), dict(zip(CLASS_NAMES, right, strict=True)))


def class_logits(logprobs: Tensor) -> Tensor:
    """Return the log-probabilities of the rank classes under the draft distribution. # logprobs [..., rank] float32 ->
    [..., 4]"""
    mass = logprobs.exp() @ members_of_classes(logprobs.device)
    beyond = 1.0 - mass.sum(-1, keepdim=True)
    return torch.cat([mass[..., :_CLASSES], beyond], dim=-1).clamp(min=LEAST).log()
