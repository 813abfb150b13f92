"""Acceptance rates of proposals, learned while serving: one table of rates by bucket, `HitTable`, and its two users.
The survival of nodes is corrected by depth and claim (`SurvivalCalibration`), a drafter's predictions for its ranks by
block and position (`RankCalibration`). A label is a node whose parent came true. Labels fade, so that a bucket without
recent labels returns to its prior.
Legend: batch, nodes as in drafters/tree.py; rows = sequences of the engine's table; buckets."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.protocol import DraftingSizes, RankOutcomes
from drafters.tree import Candidates, DraftTree
from kernels import ops
from kernels.lattice import CLASS_OF_RANK, LEAST, members_of_classes
from kernels.survival import CLAIMS, DEPTHS, HitCounts, Proposed

MIN_SURVIVAL = 1 / 400  # below it candidates never pay: a row costs 1/380 of a step where it costs least (8B, H200)

CLASS_NAMES = ("1", "2-4", "5-10")
"""Ranks of the classes that hold candidates."""

_CLASSES = len(CLASS_NAMES)
_CLAIM_PRIOR, _RANK_PRIOR = 6.0, 30.0  # predicted hits that trust in the claim or prediction counts for
_CLAIM_DECAY, _RANK_DECAY = 0.99, 0.998  # decay per verified step: memory of about 100 and 500 steps
_CLAIM_LIMITS, _RANK_LIMITS = (0.01, 2.0), (0.2, 3.0)
_OLD_WEIGHTS = 0.25  # weight of labels from before the drafter's weights were replaced
_BINS = 10  # bins of survival in the calibration error
_BIN_DECAY = 0.998


class HitTable:
    """Rates (prior + came true) / (prior + expected) by flat bucket index, within `limits`. With 1 expected of each
    label they are rates of acceptance; with its predicted probability, correction factors. Each call of `observe` makes
    earlier labels weigh `decay` times as much."""

    def __init__(
        self, prior_true: Tensor, prior_expected: Tensor, *, decay: float, limits: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        """Rates begin at prior_true / prior_expected. # both [buckets]"""
        prior_true, prior_expected = prior_true.float(), prior_expected.float()
        came_true, expected, rates = (torch.zeros_like(prior_true) for _ in range(3))
        self.counts = HitCounts(prior_true, prior_expected, came_true, expected, rates, decay, *limits)
        self.counts.estimate()
        self._ops = ops.on(prior_true.device)

    @property
    def rates(self) -> Tensor:
        """The rates. # [buckets] float32"""
        return self.counts.rates

    def observe(self, buckets: Tensor, true: Tensor, expected: Tensor) -> None:
        """Count labels; `true` and `expected` are 0 where there is none. # all three [...], the last two bool or
        float32"""
        self._ops.count_hits(self.counts, buckets, true, expected)

    def fade(self, share: float) -> None:
        """Make all labels so far weigh `share` times as much."""
        for counted in (self.counts.came_true, self.counts.expected):
            counted.mul_(share)
        self.counts.estimate()


class SurvivalCalibration:
    """Corrects the survival that any drafter claims for its nodes, by depth and claim, from verified steps."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        even = torch.full((DEPTHS * CLAIMS,), _CLAIM_PRIOR, device=device)
        self._table = HitTable(even, even, decay=_CLAIM_DECAY, limits=_CLAIM_LIMITS)
        self._bins = torch.zeros(3, _BINS, device=device)  # sums of nodes, survival and accepted nodes
        self._ops = ops.on(even.device)

    @property
    def rates(self) -> Tensor:
        """Factors of claims, for the kernel `correct_survival`. # [DEPTHS * CLAIMS] float32"""
        return self._table.rates

    def learn(self, trees: DraftTree, claimed: Tensor, buckets: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Learn from verified nodes. # claimed, buckets [batch, nodes], see `Pruned`; tokens [batch, longest], counts
        [batch], see `Committed`"""
        known = trees, claimed, buckets, tokens, counts
        self._ops.count_claims(self._table.counts, self._bins, _BIN_DECAY, *known)

    def on_weights_changed(self) -> None:
        """Weigh down labels from before the drafter's weights were replaced."""
        self._table.fade(_OLD_WEIGHTS)

    def error(self) -> float:
        """Return the expected calibration error of corrected survival over recently verified nodes; 0 before any."""
        nodes, survival, accepted = self._bins
        return float((survival - accepted).abs().sum() / nodes.sum().clamp(min=1.0))  # planned transfer


class RankCalibration:
    """Corrects what a drafter predicts for its ranks, by first or later block, position in it and class of the rank.
    A node becomes a label once the text continues after its parent, whether or not it was verified."""

    def __init__(self, block_size: int, sizes: DraftingSizes) -> None:
        even = torch.full((2 * block_size * _CLASSES,), _RANK_PRIOR, device=sizes.device)
        self._table = HitTable(even, even, decay=_RANK_DECAY, limits=_RANK_LIMITS)
        positions = torch.arange(block_size, device=sizes.device)[:, None] * _CLASSES
        first = positions + torch.tensor(CLASS_OF_RANK, device=sizes.device)  # [block, rank]
        self._first_further = block_size * _CLASSES  # the least bucket of blocks after a tree's first
        self._buckets = torch.stack([first, first + self._first_further])
        # The last row is padding of batches.
        ids = torch.zeros(4, sizes.max_sequences + 1, sizes.max_nodes, dtype=torch.int64, device=sizes.device)
        self._trees = Proposed(ids[0], ids[1], ids[2], torch.zeros_like(ids[0], dtype=torch.float32), ids[3])
        self._ops = ops.on(even.device)

    def forget(self, rows: Sequence[int]) -> None:
        """Drop these rows' trees: tokens committed next say nothing about them."""
        self._trees.depths[list(rows)] = 0

    def buckets(self, block: int) -> Tensor:
        """Return the bucket of each node of a block, counted from 0. # -> [block, rank] int64"""
        return self._buckets[min(block, 1)]

    def trust(self, block: int) -> Tensor:
        """Return the factors of a block's conditional probabilities. # -> [block, rank] float32"""
        return self._table.rates[self.buckets(block)]

    def keep(self, rows: Tensor, tree: Candidates, chosen: Tensor, predicted: Tensor, buckets: Tensor) -> None:
        """Keep these rows' trees until `learn`. # rows [batch]; chosen [batch, nodes], the tree's nodes among all
        predicted ones; predicted [batch, all nodes]; buckets [all nodes]"""
        self._ops.keep_proposed(self._trees, rows, tree, chosen, predicted, buckets)

    def learn(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        """Learn from the tokens committed after the trees kept. # rows, counts [batch]; tokens [batch, depth + 1]
        -> [2] int64: accepted tokens from blocks after a tree's first, and all committed tokens"""
        return self._ops.judge_proposed(self._trees, self._table.counts, rows, tokens, counts, self._first_further)

    def outcomes(self) -> RankOutcomes:
        """Return recent tokens by class of the rank: predicted, and right. Waits for the device."""
        sums = torch.stack([self._table.counts.expected, self._table.counts.came_true]).view(2, -1, _CLASSES).sum(1)
        predicted, right = sums.tolist()  # planned transfer
        return RankOutcomes(dict(zip(CLASS_NAMES, predicted, strict=True)), dict(zip(CLASS_NAMES, right, strict=True)))


def class_logits(logprobs: Tensor) -> Tensor:
    """Return the logarithms of the rank classes' probabilities by the draft distribution. # logprobs [..., rank]
    float32 -> [..., 4]"""
    mass = logprobs.exp() @ members_of_classes(logprobs.device)
    beyond = 1.0 - mass.sum(-1, keepdim=True)
    return torch.cat([mass[..., :_CLASSES], beyond], dim=-1).clamp(min=LEAST).log()
