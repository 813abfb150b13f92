"""From a block's states to candidate tokens and their chances: draft head, sampling noise, rank head.

The rank head sees features of the scores by which tokens are ranked (drafters/coupling.py), and predicts the class of
the target's token among them (SpecBlock appendix B).
Legend: batch, starts, block = K, draft_vocab, rank = TOP; scores [..., draft_vocab] as they are ranked."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.coupling import TreeNoise
from drafters.specblock.network import ServingNetwork
from kernels import ops
from kernels.lattice import CLASS_OF_RANK
from kernels.rank_features import TOP


@dataclass(frozen=True, slots=True)
class BlockChances:
    """What the heads say of each position of a block."""

    features: Tensor  # [..., block, NUM_FEATURES], of `rank_features`
    classes: Tensor  # [..., block, 4] logits of the rank classes

    @property
    def draft(self) -> Tensor:
        """Draft probability of ranks 1..10. # [..., block, rank]"""
        return self.features[..., :TOP].exp()


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the heads propose at each position of some blocks."""

    tokens: Tensor  # [batch, starts, block, rank] int64, target ids
    chances: BlockChances
    logits: Tensor  # [batch, starts, block, draft_vocab], without the sampling noise


def propose(network: ServingNetwork, states: Tensor, depths: Tensor, noise: TreeNoise) -> Proposal:
    """states [batch, starts, block, hidden], depths [batch, starts, block] of the proposed tokens, from 1"""
    logits = network.head(states)
    features, ids = rank_features(noise.scores(logits, depths))
    chances = BlockChances(features, network.rank_logits(states, features))
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
