"""Survival as it turns out: whatever a drafter claims of its nodes is corrected by depth and by what was claimed.

Every node whose parent was accepted is a label, and only such a node. The claims of a new drafter, or of a new version
of it, are soon judged by themselves, because old labels fade. Also says how far corrected survival is off (ECE).
Legend: batch, nodes as in drafters/tree.py; conditional = survival given that the parent survives.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.survival import tried_and_accepted
from drafters.tree import MAX_DEPTH, Candidates, DraftTree

_DEPTHS = 8  # deeper nodes count as of this depth
_CLAIMS = 8  # bins of the claimed conditional
_PRIOR = 6.0  # predicted hits that the trust in a claim weighs
_DECAY = 0.99  # per verified step: memory of about 100 steps
_LIMITS = (0.01, 2.0)
_CEILING = 0.98  # below 1: survival must fall strictly along a path
_RENEWAL = 0.25  # what old labels weigh for a new version
_BINS = 10  # of the calibration error
_BIN_DECAY = 0.998
_DOUBLINGS = (MAX_DEPTH - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Claims:
    """What was claimed of nodes before correction, to be judged when they were verified; both [batch, nodes]."""

    conditional: Tensor  # float32
    bucket: Tensor  # int64

    def take(self, kept: Tensor) -> "Claims":
        """The claims of the nodes that were kept. # kept [batch, width] int64"""
        return Claims(self.conditional.gather(1, kept), self.bucket.gather(1, kept))


class Recalibration:
    """Correction factors of conditional probabilities, (prior + came true) / (prior + claimed), by depth and claim."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._true = torch.zeros(_DEPTHS * _CLAIMS, device=device)
        self._claimed = torch.zeros(_DEPTHS * _CLAIMS, device=device)
        self._factors = torch.ones(_DEPTHS * _CLAIMS, device=device)
        self._bins = torch.zeros(3, _BINS, device=device)  # nodes, their survival, how many were accepted

    def correct(self, candidates: Candidates) -> tuple[Candidates, Claims]:
        """The candidates with corrected survival; what had none keeps none, and it still falls along every path."""
        if candidates.width == 0:
            return candidates, Claims(candidates.survival, candidates.parents)
        above = pad(candidates.survival, (1, 0), value=1.0).gather(1, candidates.parents + 1)
        conditional = (candidates.survival / above.clamp(min=1e-9)).clamp(max=1.0)
        bucket = _buckets(candidates.depths, conditional)
        corrected = (conditional * self._factors[bucket]).clamp(max=_CEILING)
        return replace(candidates, survival=_along_paths(corrected, candidates.parents)), Claims(conditional, bucket)

    def learn(self, claims: Claims, tree: DraftTree, path: Tensor) -> None:
        """Take in what the target said of verified nodes; claims in the order of the tree's nodes, path [batch, depth]
        as in `VerifyResult`."""
        tried, accepted = tried_and_accepted(tree, path)
        flat = claims.bucket.flatten()
        self._true.mul_(_DECAY).index_add_(0, flat, (tried & accepted).float().flatten())
        self._claimed.mul_(_DECAY).index_add_(0, flat, (claims.conditional * tried).flatten())
        self._update_factors()
        self._judge(tree, accepted)

    def renew(self) -> None:
        """The drafter has changed: what was learnt of the old one counts for less."""
        self._true *= _RENEWAL
        self._claimed *= _RENEWAL
        self._update_factors()

    def error(self) -> float:
        """Expected calibration error of corrected survival over recently verified nodes; 0 before there are any."""
        nodes, survival, accepted = self._bins
        return float((survival - accepted).abs().sum() / nodes.sum().clamp(min=1.0))  # planned transfer

    def _update_factors(self) -> None:
        """In place: captures read them where they stand."""
        self._factors.copy_(((_PRIOR + self._true) / (_PRIOR + self._claimed)).clamp_(*_LIMITS))

    def _judge(self, tree: DraftTree, accepted: Tensor) -> None:
        valid = tree.valid.float().flatten()
        place = (tree.survival * _BINS).long().clamp(max=_BINS - 1).flatten()
        values = torch.stack([valid, tree.survival.flatten() * valid, accepted.float().flatten()])
        self._bins.mul_(_BIN_DECAY).index_add_(1, place, values)


def _buckets(depths: Tensor, conditional: Tensor) -> Tensor:
    claim = (conditional * _CLAIMS).long().clamp(max=_CLAIMS - 1)
    return (depths - 1).clamp(0, _DEPTHS - 1) * _CLAIMS + claim


def _along_paths(conditional: Tensor, parents: Tensor) -> Tensor:
    """Products from the root's child down to each node. # both [batch, nodes] -> [batch, nodes]"""
    nodes = parents.shape[1]
    # The root becomes the last column: it changes nothing and is its own parent.
    product = pad(conditional, (0, 1), value=1.0)
    jump = pad(torch.where(parents < 0, nodes, parents), (0, 1), value=nodes)
    for _ in range(_DOUBLINGS):
        product, jump = product * product.gather(1, jump), jump.gather(1, jump)
    return product[:, :nodes]
