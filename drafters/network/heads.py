"""Computes candidate tokens and their conditional probabilities from a block's states: draft head, sampling noise, rank
head.

The rank head reads the states and features of the scores by which tokens are ranked (drafters/coupling.py). It predicts
the class of the target token's rank (SpecBlock appendix B).
Legend: batch, starts, block = K, draft_vocab, rank = TOP; scores [..., draft_vocab]
by which tokens are ranked."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.coupling import TreeNoise
from drafters.network.model import SpecBlock
from drafters.network.served import ServingNetwork
from kernels import ops
from kernels.lattice import CLASS_OF_RANK


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidate tokens at each position of some blocks."""

    tokens: Tensor  # [batch, starts, block, rank] int64, target ids
    predicted: Tensor  # [batch, starts, block, rank], conditional probability of each given its parent
    logits: Tensor  # [batch, starts, block, draft_vocab], without the sampling noise


def propose(network: ServingNetwork | SpecBlock, states: Tensor, depths: Tensor, noise: TreeNoise) -> Proposal:
    """Choose and rank candidates at each position; the probability of each rank class is divided among its ranks in
    proportion to their draft probability. # states [batch, starts, block, hidden]; depths [batch, starts,
    block] of the proposed tokens, from 1"""
    logits, likeliest = network.head(states), network.traits.rank_head.scores
    scores = noise.scores(logits, depths)
    features, ids = rank_features(scores)
    read = rank_features(scores, likeliest)[0] if likeliest else features
    predicted = ops.on(states.device).spread_classes(network.rank_logits(states, read), features)
    return Proposal(network.d2t[ids], predicted, logits)


def rank_features(scores: Tensor, likeliest: int = 0) -> tuple[Tensor, Tensor]:
    """Return 15 features (top-10 log-probabilities, the gaps of rank 1 to ranks 2, 3 and 5, the top probability and the
    entropy) and the draft ids of ranks 1..10. `likeliest`: number of tokens over which the distribution is taken; 0:
    all. # scores [..., draft_vocab] -> [..., 15] float32, [..., 10] int64"""
    compute = ops.on(scores.device).rank_features
    if not likeliest:
        return compute(scores)
    kept = scores.topk(likeliest, dim=-1)
    features, ranks = compute(kept.values)
    return features, kept.indices.gather(-1, ranks)


def rank_class(ids: Tensor, token: Tensor) -> Tensor:
    """Return the class of a token's rank, 3 (beyond) if it is none of the ten.
    # ids [..., 10] draft ids by rank, token [...] draft id or -1 -> [...] int64"""
    found = ids == token[..., None]
    classes = torch.tensor(CLASS_OF_RANK, device=ids.device)
    return torch.where(found.any(-1), (found * classes).sum(-1), 3)
