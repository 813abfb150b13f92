"""Coupled drafting: at T > 0 tokens are ranked by log q / T + g, where g is the Gumbel noise with which the target will
sample that position. A drafter close to the target then proposes the token that the target will sample. Where a request
filters tokens (top_k, top_p, min_p), the scores of those that the drafter expects the filters to drop are lowered.
Legend: batch, starts, block as in kernels/lattice.py; draft_vocab = number of tokens that can be drafted."""

from typing import NamedTuple

import torch
from torch import Tensor

from drafters.protocol import Noise
from kernels import ops
from kernels.sample import Filters

LIKELIEST = 64
"""Number of likeliest tokens among which filters are applied; a filter that keeps all of them drops none."""
DROPPED = 3.0
"""Lowers a dropped token's score, as the target may keep it: of 1 to 30, claims were likeliest to be right from 2 to 4
(temperatures 0.7 and 1, top_k 20, top_p 0.95); above, the rank head meets scores that it was not trained on."""


class TreeNoise(NamedTuple):
    """The target's sampling noise at the next positions of each sequence, for the tokens that can be drafted."""

    temperatures: Tensor  # [batch] float32
    gumbel: Tensor  # [batch, depth, draft_vocab] float32, 0 at temperature 0; depth is 0 if all are
    filters: Filters | None = None  # [batch], or of length 0 if no token is dropped

    @staticmethod
    def of(noise: Noise, depth: int, d2t: Tensor) -> "TreeNoise":
        """Compute the noise of `depth` positions after each root. # d2t [draft_vocab] int64, target ids"""
        if not noise.warm:
            none = noise.temperatures.new_zeros(len(noise.temperatures), 0, len(d2t))
            return TreeNoise(noise.temperatures, none, noise.filters)
        positions = noise.positions[:, None] + 1 + torch.arange(depth, device=d2t.device)
        seeds = noise.seeds[:, None].expand_as(positions)
        gumbel = ops.gumbel_noise_of(seeds.flatten(), positions.flatten(), d2t).view(*positions.shape, -1)
        return TreeNoise(noise.temperatures, gumbel * (noise.temperatures > 0)[:, None, None], noise.filters)

    def along(self, logits: Tensor) -> Tensor:
        """Return `scores` of a block after each root. # logits [batch, block, draft_vocab] -> like logits"""
        depths = torch.arange(1, logits.shape[1] + 1, device=logits.device).expand(logits.shape[0], 1, -1)
        return self.scores(logits[:, None], depths)[:, 0]

    def scores(self, logits: Tensor, depths: Tensor) -> Tensor:
        """Return the scores by which tokens are ranked: log q / T + g, or log q if T = 0, up to a constant. # logits
        [batch, starts, block, draft_vocab], depths [batch, starts, block], from 1 -> like logits"""
        known = self.gumbel.shape[1]
        if not known:
            return logits
        batch = torch.arange(depths.shape[0], device=depths.device)[:, None, None]
        scores = logits.float() / torch.where(self.temperatures > 0, self.temperatures, 1.0)[:, None, None, None]
        if self.filters is not None and len(self.filters.top_k):
            least = least_kept(scores, self.filters).where(self.temperatures[:, None, None] > 0, -torch.inf)
            scores = scores - DROPPED * (scores < least[..., None])
        return scores + self.gumbel[batch, (depths - 1).clamp(max=known - 1)]


def least_kept(scores: Tensor, filters: Filters) -> Tensor:
    """Return the lowest score that filters keep, as `kernels.sample` defines them; -inf if they keep all. # scores
    [batch, starts, block, draft_vocab] without noise; filters [batch] -> [batch, starts, block]"""
    log_min_p, top_k, top_p = (values[:, None, None, None] for values in filters)
    best = scores.topk(min(LIKELIEST, scores.shape[-1])).values  # [..., LIKELIEST], like all tensors below
    ranks, floor = torch.arange(best.shape[-1], device=best.device), best[..., :1] + log_min_p
    kept = (best >= floor) & ((ranks < top_k) | (top_k <= 0))
    whole = scores.where(scores >= floor, -torch.inf).logsumexp(-1, keepdim=True)
    counted = best.where(kept, -torch.inf)
    mass = (counted - whole.where(top_k <= 0, counted.logsumexp(-1, keepdim=True))).exp()
    kept &= (mass.cumsum(-1) - mass < top_p) | (ranks == 0) | (top_p >= 1)
    least = best.where(kept, torch.inf).amin(-1)
    return least.where(~kept.all(-1), floor[..., 0])
