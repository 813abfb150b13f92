"""How far the rank head can be trusted: per block, position and class, how often a candidate came true against how
often that was predicted. Learned from every committed token: a node's fate is known once the text goes on past its
parent, whether or not it was verified.

Legend: bucket = (first or later block, position in it, class of the rank); nodes [batch, nodes].
"""

import torch
from torch import Tensor

from drafters.protocol import RankOutcomes
from drafters.specblock.heads import CLASS_NAMES, CLASS_OF_RANK

_PRIOR = 30.0  # predicted hits that the trust in the rank head weighs
_DECAY = 0.998  # per step: memory of about 500 steps
_LIMITS = (0.2, 3.0)
_CEILING = 0.98  # below 1: survival must fall strictly along a path
_CLASSES = len(CLASS_NAMES)  # those that can be drafted


class Calibration:
    """Correction factors of conditional probabilities: (prior + came true) / (prior + predicted).

    Its tensors stay where they are: captured computations read and write them there.
    """

    def __init__(self, block_size: int, *, device: torch.device | str) -> None:
        buckets = 2 * block_size * _CLASSES
        self._true = torch.zeros(buckets, device=device)
        self._predicted = torch.zeros(buckets, device=device)
        self._factors = torch.ones(buckets, device=device)
        positions = torch.arange(block_size, device=device)[:, None] * _CLASSES
        first = positions + torch.tensor(CLASS_OF_RANK, device=device)  # [block, rank]
        self.first_further = block_size * _CLASSES  # the least bucket of blocks after a tree's first
        self._buckets = torch.stack([first, first + self.first_further])

    def buckets(self, block: int) -> Tensor:
        """Bucket of each node of the block-th forward. # -> [block, rank] int64"""
        return self._buckets[min(block, 1)]

    def correct(self, conditional: Tensor, block: int) -> Tensor:
        """Conditional probabilities after what was learned. # [..., block, rank] float32"""
        corrected: Tensor = conditional * self._factors[self.buckets(block)]
        return corrected.clamp(max=_CEILING)

    def observe(self, buckets: Tensor, predicted: Tensor, true: Tensor, tried: Tensor) -> None:
        """Learn from nodes whose parent came true. # all [batch, nodes]; predicted uncorrected"""
        flat = buckets.flatten()
        self._true.mul_(_DECAY).index_add_(0, flat, (true & tried).float().flatten())
        self._predicted.mul_(_DECAY).index_add_(0, flat, (predicted * tried).flatten())
        torch.clamp((_PRIOR + self._true) / (_PRIOR + self._predicted), *_LIMITS, out=self._factors)

    def outcomes(self) -> RankOutcomes:
        """By class of the rank: recent tokens predicted, and those that came true."""
        sums = torch.stack([self._predicted, self._true]).view(2, -1, _CLASSES).sum(1)
        predicted, right = sums.tolist()  # planned transfer
        return RankOutcomes(dict(zip(CLASS_NAMES, predicted, strict=True)), dict(zip(CLASS_NAMES, right, strict=True)))
