"""How often proposals come true, learned while serving: the source of every survival estimate, and its correction.
A label is a node whose parent came true. Labels fade, so that a bucket nobody has seen for a while returns to its
prior. Legend: batch, nodes as in drafters/tree.py; conditional = survival given that the parent survives."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.tree import Candidates, DraftTree, accumulated

CEILING = 0.98  # below 1: survival must fall strictly along a path
MIN_SURVIVAL = 0.02  # below it candidates never pay: a node costs more than 1/50 of a step on any machine

_DEPTHS = 8  # deeper nodes count as of this depth
_CLAIMS = 8  # bins of the claimed conditional
_CLAIM_PRIOR = 6.0  # predicted hits that the trust in a claim weighs
_CLAIM_DECAY = 0.99  # per verified step: memory of about 100 steps
_CLAIM_LIMITS = (0.01, 2.0)
_RENEWAL = 0.25  # what old labels weigh for a new version
_BINS = 10  # of the calibration error
_BIN_DECAY = 0.998


class HitTable:
    """(prior + came true) / (prior + expected) for flat bucket indices, within `limits`: with 1 expected of each label
    a rate of acceptance, with its predicted probability a correction factor. Labels weigh `decay` times less with every
    later call of `observe`. Tensors are changed in place: captured computations read them where they stand.
    """

    def __init__(
        self, prior_true: Tensor, prior_expected: Tensor, *, decay: float, limits: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        self._prior_true = prior_true.float()  # [buckets]
        self._prior_expected = prior_expected.float()  # [buckets]
        self._decay = decay
        self._limits = limits
        self.true = torch.zeros_like(self._prior_true)
        self.expected = torch.zeros_like(self._prior_expected)
        self.ratios = torch.empty_like(self._prior_true)
        self._estimate()

    def observe(self, buckets: Tensor, true: Tensor, expected: Tensor) -> None:
        """Count labels; both are 0 where there is none. # all three [...], true and expected bool or float32"""
        flat = buckets.flatten()
        self.true.mul_(self._decay).index_add_(0, flat, true.float().flatten())
        self.expected.mul_(self._decay).index_add_(0, flat, expected.float().flatten())
        self._estimate()

    def fade(self, share: float) -> None:
        """What was learned weighs only so much from now on."""
        self.true *= share
        self.expected *= share
        self._estimate()

    def _estimate(self) -> None:
        hits = (self._prior_true + self.true).div_(self._prior_expected + self.expected)
        torch.clamp(hits, *self._limits, out=self.ratios)


def tried_and_accepted(tree: DraftTree, path: Tensor) -> tuple[Tensor, Tensor]:
    """Which nodes were tried, for their parent is the root or was accepted, and which were accepted. Only a tried node
    is a label. # path [batch, depth] int64 as in `VerifyResult` -> two masks [batch, nodes] bool"""
    batch, nodes = tree.tokens.shape
    # The column after the last node takes the padding of `path`; the one before the first is the root.
    on_path = torch.zeros(batch, nodes + 2, dtype=torch.bool, device=tree.tokens.device)
    on_path.scatter_(1, torch.where(path < 0, nodes, path) + 1, True)
    on_path[:, 0] = True
    tried = on_path.gather(1, tree.parents + 1) & tree.valid
    return tried, on_path[:, 1 : nodes + 1] & tree.valid


class Claims(NamedTuple):
    """What was claimed of nodes before correction, to be judged when they were verified; both [batch, nodes]."""

    conditional: Tensor  # float32
    bucket: Tensor  # int64

    def take(self, kept: Tensor) -> "Claims":
        """The claims of the nodes that were kept. # kept [batch, width] int64"""
        return Claims(self.conditional.gather(1, kept), self.bucket.gather(1, kept))


class SurvivalCalibration:
    """Corrects whatever a drafter claims of its nodes, by depth and claim, from verified steps."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        even = torch.full((_DEPTHS * _CLAIMS,), _CLAIM_PRIOR, device=device)
        self._table = HitTable(even, even, decay=_CLAIM_DECAY, limits=_CLAIM_LIMITS)
        self._bins = torch.zeros(3, _BINS, device=device)  # nodes, their survival, how many were accepted

    def correct(self, candidates: Candidates) -> tuple[Candidates, Claims]:
        """The candidates with corrected survival; what had none keeps none, and it still falls along every path."""
        if candidates.width == 0:
            return candidates, Claims(candidates.survival, candidates.parents)
        above = pad(candidates.survival, (1, 0), value=1.0).gather(1, candidates.parents + 1)
        conditional = (candidates.survival / above.clamp(min=1e-9)).clamp(max=1.0)
        claim = (conditional * _CLAIMS).long().clamp(max=_CLAIMS - 1)
        bucket = (candidates.depths - 1).clamp(0, _DEPTHS - 1) * _CLAIMS + claim
        corrected = (conditional * self._table.ratios[bucket]).clamp(max=CEILING)
        survival = accumulated(pad(corrected, (0, 1), value=1.0), candidates.parents, torch.mul)
        return candidates._replace(survival=survival), Claims(conditional, bucket)

    def learn(self, claims: Claims, tree: DraftTree, path: Tensor) -> None:
        """Take in what the target said of verified nodes; claims in the order of the tree's nodes, path [batch, depth]
        as in `VerifyResult`."""
        tried, accepted = tried_and_accepted(tree, path)
        self._table.observe(claims.bucket, tried & accepted, claims.conditional * tried)
        valid = tree.valid.float().flatten()
        place = (tree.survival * _BINS).long().clamp(max=_BINS - 1).flatten()
        values = torch.stack([valid, tree.survival.flatten() * valid, accepted.float().flatten()])
        self._bins.mul_(_BIN_DECAY).index_add_(1, place, values)

    def renew(self) -> None:
        """The drafter has changed: what was learnt of the old one counts for less."""
        self._table.fade(_RENEWAL)

    def error(self) -> float:
        """Expected calibration error of corrected survival over recently verified nodes; 0 before there are any."""
        nodes, survival, accepted = self._bins
        return float((survival - accepted).abs().sum() / nodes.sum().clamp(min=1.0))  # planned transfer
