"""From a block's states to candidate tokens and their chances: draft head, sampling noise, rank head.

At T > 0 tokens are ranked by log q / T + g, with the noise g of the very position the target will sample with
(coupled drafting), so that a drafter close to the target proposes the token the noise will select. The rank head sees
features of the same scores, and predicts the class of the target's token among them (SpecBlock appendix B).
Legend: batch, starts, block = K, draft_vocab, rank = TOP; scores [..., draft_vocab] as they are ranked."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.protocol import Noise
from drafters.specblock.network import ServingNetwork
from kernels import ops

CLASS_OF_RANK = (0, 1, 1, 1, 2, 2, 2, 2, 2, 2)
"""Class of ranks 1..10; the last class, beyond, is 3."""

CLASS_NAMES = ("1", "2-4", "5-10")
"""Ranks of the classes that hold candidates."""


@dataclass(frozen=True, slots=True)
class BlockChances:
    """What the heads say of each position of a block."""

    draft: Tensor  # [..., block, rank] draft probability of ranks 1..10
    classes: Tensor  # [..., block, 4] probability of each rank class


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the heads propose at each position of some blocks."""

    tokens: Tensor  # [batch, starts, block, rank] int64, target ids
    chances: BlockChances
    logits: Tensor  # [batch, starts, block, draft_vocab], without the sampling noise


class TreeNoise(NamedTuple):
    """The sampling noise of the next positions of each sequence, restricted to tokens that can be drafted."""

    temperatures: Tensor  # [batch] float32
    gumbel: Tensor  # [batch, depth, draft_vocab] float32, 0 where the temperature is; of depth 0 where nobody samples

    @staticmethod
    def of(noise: Noise, depth: int, d2t: Tensor) -> "TreeNoise":
        """The noise of so many positions behind the roots."""
        if not noise.warm:
            return TreeNoise(noise.temperatures, noise.temperatures.new_zeros(len(noise.temperatures), 0, len(d2t)))
        positions = noise.positions[:, None] + 1 + torch.arange(depth, device=d2t.device)
        seeds = noise.seeds[:, None].expand_as(positions)
        gumbel = ops.gumbel_noise_of(seeds.flatten(), positions.flatten(), d2t).view(*positions.shape, -1)
        return TreeNoise(noise.temperatures, gumbel * (noise.temperatures > 0)[:, None, None])

    def scores(self, logits: Tensor, depths: Tensor) -> Tensor:
        """log q, or log q / T + g, up to a constant. # logits [batch, starts, block, draft_vocab], depths
        [batch, starts, block]"""
        known = self.gumbel.shape[1]
        if not known:
            return logits
        lines = torch.arange(depths.shape[0], device=depths.device)[:, None, None]
        scores = logits.float() / torch.where(self.temperatures > 0, self.temperatures, 1.0)[:, None, None, None]
        return scores + self.gumbel[lines, (depths - 1).clamp(max=known - 1)]


def propose(network: ServingNetwork, states: Tensor, depths: Tensor, noise: TreeNoise) -> Proposal:
    """states [batch, starts, block, hidden], depths [batch, starts, block] of the proposed tokens, from 1"""
    logits = network.head(states)
    features, ids = rank_features(noise.scores(logits, depths))
    classes = network.rank_logits(states, features).softmax(-1)
    chances = BlockChances(draft=features[..., : ids.shape[-1]].exp(), classes=classes)
    return Proposal(network.d2t[ids], chances, logits)


def rank_features(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The 15 features (top-10 log-probabilities, the gaps of rank 1 to ranks 2, 3 and 5, the top probability and the
    entropy) and the draft ids of ranks 1..10. # scores [..., draft_vocab] -> [..., 15] float32, [..., 10] int64"""
    return ops.on(scores.device).rank_features(scores)


def rank_class(ids: Tensor, token: Tensor) -> Tensor:
    """Class of a token by its rank. # ids [..., 10] draft ids by rank, token [...] draft id or -1 -> [...] int64"""
    found = ids == token[..., None]
    classes = torch.tensor(CLASS_OF_RANK, device=ids.device)
    return torch.where(found.any(-1), (found * classes).sum(-1), 3)
