"""How often proposals come true, learned while serving: the source of every survival estimate.

Counts accepted and tried nodes per bucket and forgets exponentially, so that a bucket nobody has seen for a while
returns to its prior. What a bucket stands for is the drafter's business.
"""

import torch
from torch import Tensor

from drafters.tree import DraftTree


class AcceptanceTable:
    """Conditional acceptance (node accepted, given that its parent was) for flat bucket indices.

    The prior counts as `prior_accepted` of `prior_tried` observations per bucket and never fades; what is observed
    weighs `decay` times less with every later call of `observe`. Rates stay within `limits`.
    """

    def __init__(
        self,
        prior_accepted: Tensor,
        prior_tried: Tensor,
        *,
        decay: float,
        limits: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self._prior_accepted = prior_accepted.float()  # [buckets]
        self._prior_tried = prior_tried.float()  # [buckets]
        self._decay = decay
        self._limits = limits
        self._accepted = torch.zeros_like(self._prior_accepted)
        self._tried = torch.zeros_like(self._prior_tried)
        self._rates = self._estimate()

    def rate(self, buckets: Tensor) -> Tensor:
        """Estimated conditional acceptance. # buckets [...] int64 -> [...] float32"""
        return self._rates[buckets]

    def observe(self, buckets: Tensor, accepted: Tensor, mask: Tensor) -> None:
        """Count what verification said where `mask` holds. # all three [...], accepted and mask bool"""
        flat = buckets.flatten()
        tried = mask.flatten().float()
        self._tried.mul_(self._decay).index_add_(0, flat, tried)
        self._accepted.mul_(self._decay).index_add_(0, flat, tried * accepted.flatten())
        self._rates = self._estimate()

    def _estimate(self) -> Tensor:
        accepted = self._prior_accepted + self._accepted
        return accepted.div_(self._prior_tried + self._tried).clamp_(*self._limits)


def tried_and_accepted(tree: DraftTree, path: Tensor) -> tuple[Tensor, Tensor]:
    """What one verify says about each node: it was tried when its parent is the root or was accepted.

    path [batch, depth] int64 as in `VerifyResult`. Only a tried node is a label; below a rejected one nothing is known.
    -> two masks [batch, nodes] bool
    """
    batch, nodes = tree.tokens.shape
    # The column after the last node takes the padding of `path`; the one before the first is the root.
    on_path = torch.zeros(batch, nodes + 2, dtype=torch.bool, device=tree.tokens.device)
    on_path.scatter_(1, torch.where(path < 0, nodes, path) + 1, True)
    on_path[:, 0] = True
    tried = on_path.gather(1, tree.parents + 1) & tree.valid
    return tried, on_path[:, 1 : nodes + 1] & tree.valid
