"""How often proposals come true, learned while serving: the source of every survival estimate, and its correction.
A label is a node whose parent came true. Labels fade, so that a bucket nobody has seen for a while returns to its
prior. Legend: batch, nodes as in drafters/tree.py."""

import torch
from torch import Tensor

from drafters.tree import DraftTree
from kernels import ops
from kernels.survival import CLAIMS, DEPTHS, HitCounts

MIN_SURVIVAL = 1 / 400  # below it candidates never pay: a row costs 1/380 of a step where it costs least (8B, H200)

_CLAIM_PRIOR = 6.0  # predicted hits that the trust in a claim weighs
_CLAIM_DECAY = 0.99  # per verified step: memory of about 100 steps
_CLAIM_LIMITS = (0.01, 2.0)
_RENEWAL = 0.25  # what old labels weigh for a new version
_BINS = 10  # of the calibration error
_BIN_DECAY = 0.998


class HitTable:
    """(prior + came true) / (prior + expected) for flat bucket indices, within `limits`: with 1 expected of each label
    a rate of acceptance, with its predicted probability a correction factor. Labels weigh `decay` times less with every
    later call of `observe`.
    """

    def __init__(
        self, prior_true: Tensor, prior_expected: Tensor, *, decay: float, limits: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        """Both priors [buckets]."""
        prior_true, prior_expected = prior_true.float(), prior_expected.float()
        came_true, expected, rates = (torch.zeros_like(prior_true) for _ in range(3))
        self.counts = HitCounts(prior_true, prior_expected, came_true, expected, rates, decay, *limits)
        self.counts.estimate()
        self._ops = ops.on(prior_true.device)

    @property
    def rates(self) -> Tensor:
        """# [buckets]"""
        return self.counts.rates

    def observe(self, buckets: Tensor, true: Tensor, expected: Tensor) -> None:
        """Count labels; both are 0 where there is none. # all three [...], true and expected bool or float32"""
        self._ops.count_hits(self.counts, buckets, true, expected)

    def fade(self, share: float) -> None:
        """What was learned weighs only so much from now on."""
        for counted in (self.counts.came_true, self.counts.expected):
            counted.mul_(share)
        self.counts.estimate()


class SurvivalCalibration:
    """Corrects whatever a drafter claims of its nodes, by depth and claim, from verified steps."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        even = torch.full((DEPTHS * CLAIMS,), _CLAIM_PRIOR, device=device)
        self._table = HitTable(even, even, decay=_CLAIM_DECAY, limits=_CLAIM_LIMITS)
        self._bins = torch.zeros(3, _BINS, device=device)  # nodes, their survival, how many were accepted
        self._ops = ops.on(even.device)

    @property
    def rates(self) -> Tensor:
        """What claims are multiplied by, for `correct_survival`. # [DEPTHS * CLAIMS]"""
        return self._table.rates

    def learn(self, trees: DraftTree, claimed: Tensor, buckets: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Take in what the target said of verified nodes. # claimed, buckets [batch, nodes] as of `Pruned`; tokens
        [batch, longest], counts [batch] as of `Committed`"""
        known = trees, claimed, buckets, tokens, counts
        self._ops.count_claims(self._table.counts, self._bins, _BIN_DECAY, *known)

    def renew(self) -> None:
        """The drafter has changed: what was learnt of the old one counts for less."""
        self._table.fade(_RENEWAL)

    def error(self) -> float:
        """Expected calibration error of corrected survival over recently verified nodes; 0 before there are any."""
        nodes, survival, accepted = self._bins
        return float((survival - accepted).abs().sum() / nodes.sum().clamp(min=1.0))  # planned transfer
