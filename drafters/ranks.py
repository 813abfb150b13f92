"""Ranks of drafted tokens, and how far what is predicted of them can be trusted, learned from every committed token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.calibration import HitTable
from drafters.protocol import DraftingSizes, RankOutcomes
from drafters.tree import Candidates
from kernels import ops
from kernels.lattice import CLASS_OF_RANK, LEAST, members_of_classes
from kernels.survival import Proposed

CLASS_NAMES = ("1", "2-4", "5-10")
"""Ranks of the classes that hold candidates."""

_PRIOR = 30.0  # predicted hits that the trust in a prediction weighs
_DECAY = 0.998  # per step: memory of about 500 steps
_LIMITS = (0.2, 3.0)
_CLASSES = len(CLASS_NAMES)  # those that can be drafted


def class_logits(logprobs: Tensor) -> Tensor:
    """What a drafter's own distribution says of the classes. # [..., rank] float32 -> [..., 4]"""
    mass = logprobs.exp() @ members_of_classes(logprobs.device)
    beyond = 1.0 - mass.sum(-1, keepdim=True)
    return torch.cat([mass[..., :_CLASSES], beyond], dim=-1).clamp(min=LEAST).log()


class RankCalibration:
    """Corrects what a drafter predicts of its ranks, per bucket of first or later block, position in it and class
    of the rank. A node's fate is known once the text goes on past its parent, whether or not it was verified."""

    def __init__(self, block_size: int, sizes: DraftingSizes) -> None:
        even = torch.full((2 * block_size * _CLASSES,), _PRIOR, device=sizes.device)
        self._table = HitTable(even, even, decay=_DECAY, limits=_LIMITS)
        positions = torch.arange(block_size, device=sizes.device)[:, None] * _CLASSES
        first = positions + torch.tensor(CLASS_OF_RANK, device=sizes.device)  # [block, rank]
        self.first_further = block_size * _CLASSES  # the least bucket of blocks after a tree's first
        self._buckets = torch.stack([first, first + self.first_further])
        # Behind the rows of sequences stands one of nobody's, which pads batches.
        ids = torch.zeros(4, sizes.max_sequences + 1, sizes.max_nodes, dtype=torch.int64, device=sizes.device)
        self._trees = Proposed(ids[0], ids[1], ids[2], torch.zeros_like(ids[0], dtype=torch.float32), ids[3])
        self._ops = ops.on(even.device)

    def forget(self, rows: Sequence[int]) -> None:
        """What is committed next must not be taken for the fate of old trees."""
        self._trees.depths[list(rows)] = 0

    def buckets(self, block: int) -> Tensor:
        """Bucket of each node of the block-th forward. # -> [block, rank] int64"""
        return self._buckets[min(block, 1)]

    def trust(self, block: int) -> Tensor:
        """What conditional probabilities of the block-th forward are to be multiplied by. # -> [block, rank] float32"""
        return self._table.rates[self.buckets(block)]

    def keep(self, rows: Tensor, tree: Candidates, chosen: Tensor, predicted: Tensor, buckets: Tensor) -> None:
        """These rows' trees, whose nodes were `chosen` among those that were predicted, each of its bucket.
        # chosen as of `merge_trees`; predicted [batch, all nodes]; buckets [all nodes]"""
        self._ops.keep_proposed(self._trees, rows, tree, chosen, predicted, buckets)

    def learn(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        """Learn from what was committed behind the trees kept; says how many accepted tokens came from blocks after a
        tree's first, and how many there are. # rows, counts [batch]; tokens [batch, depth + 1] -> [2] int64"""
        return self._ops.judge_proposed(self._trees, self._table.counts, rows, tokens, counts, self.first_further)

    def outcomes(self) -> RankOutcomes:
        """By class of the rank: recent tokens predicted, and those that came true."""
        sums = torch.stack([self._table.counts.expected, self._table.counts.came_true]).view(2, -1, _CLASSES).sum(1)
        predicted, right = sums.tolist()  # planned transfer
        return RankOutcomes(dict(zip(CLASS_NAMES, predicted, strict=True)), dict(zip(CLASS_NAMES, right, strict=True)))
