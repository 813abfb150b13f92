"""Coupled drafting: at T > 0 tokens are ranked by log q / T + g, where g is the Gumbel noise with which the target will
sample that position. A drafter close to the target then proposes the token that the target will sample.
Legend: batch, starts, block as in kernels/lattice.py; draft_vocab = number of tokens that can be drafted."""

from typing import NamedTuple

import torch
from torch import Tensor

from drafters.protocol import Noise
from kernels import ops


class TreeNoise(NamedTuple):
    """The target's sampling noise at the next positions of each sequence, for the tokens that can be drafted."""

    temperatures: Tensor  # [batch] float32
    gumbel: Tensor  # [batch, depth, draft_vocab] float32, 0 at temperature 0; depth is 0 if all are

    @staticmethod
    def of(noise: Noise, depth: int, d2t: Tensor) -> "TreeNoise":
        """Compute the noise of `depth` positions after each root. # d2t [draft_vocab] int64, target ids"""
        if not noise.warm:
            return TreeNoise(noise.temperatures, noise.temperatures.new_zeros(len(noise.temperatures), 0, len(d2t)))
        positions = noise.positions[:, None] + 1 + torch.arange(depth, device=d2t.device)
        seeds = noise.seeds[:, None].expand_as(positions)
        gumbel = ops.gumbel_noise_of(seeds.flatten(), positions.flatten(), d2t).view(*positions.shape, -1)
        return TreeNoise(noise.temperatures, gumbel * (noise.temperatures > 0)[:, None, None])

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
        return scores + self.gumbel[batch, (depths - 1).clamp(max=known - 1)]
