"""From a drafter's scores to nodes of its tree, which grows by forwards: features of a distribution, probabilities of
ranks, parents and survival of nodes, and the nodes from which the next forward starts.

A rank head reads the log probabilities of the top ranks, how far the first stands out, and how broad the rest is,

    logs_1..10 = top scores - lse,   gaps = logs_1 - logs_(2, 3, 5),   exp(logs_1),   entropy = lse - sum_v q(v) z(v)

with z the scores, lse their log sum exp and q = exp(z - lse).

Each forward runs some blocks, which start at nodes of the one before. A block's first ranks form its spine; the other
ranks are leaves. With blocks of one position this is a beam: all nodes are leaves, and the likeliest paths continue.
Legend: batch, starts = blocks begun at once, block = positions of one, rank = TOP, nodes = starts * block * rank.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from kernels.survival import CEILING
from kernels.tree_attention import MAX_DEPTH
from kernels.trees import ROOT

TOP = 10
"""Number of ranks that have features."""

GAPS = (1, 2, 4)
"""Ranks, from 0, whose distance to the first is a feature."""

NUM_FEATURES = TOP + len(GAPS) + 2


def rank_features(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The features, and the ids of ranks 1..TOP; equal scores may come in any order.
    # scores [..., vocab] -> [..., NUM_FEATURES] float32, [..., TOP] int64"""
    scores = scores.float()
    top = scores.topk(TOP, dim=-1)
    total = scores.logsumexp(-1, keepdim=True)
    logs = top.values - total  # [..., TOP]
    gaps = logs[..., :1] - torch.stack([logs[..., rank] for rank in GAPS], dim=-1)
    entropy = total - (scores.softmax(-1) * scores).sum(-1, keepdim=True)
    return torch.cat([logs, gaps, logs[..., :1].exp(), entropy], dim=-1), top.indices


CLASS_OF_RANK = (0, 1, 1, 1, 2, 2, 2, 2, 2, 2)
"""Class of ranks 1..10; the last class, beyond, is 3."""

LEAST = 1e-9
"""Lower bound of a divisor, or of the argument of a logarithm."""


class StartNodes(NamedTuple):
    """The nodes (or roots) at which one forward's blocks start, all [batch, starts]."""

    node: Tensor  # int64, number among all nodes grown so far, ROOT for the root
    depth: Tensor  # int64, 0 for the root
    survival: Tensor  # float32, 1 for the root; 0 for no start, below which no node survives

    @staticmethod
    def root(batch: int, device: torch.device) -> "StartNodes":
        """The root of each sequence. # [batch, 1]"""
        zeros = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        return StartNodes(zeros + ROOT, zeros, zeros + 1.0)


class Lattice(NamedTuple):
    """The nodes of one forward's blocks."""

    origin: StartNodes
    tokens: Tensor  # [batch, starts, block, rank] int64
    parents: Tensor  # [batch, nodes] int64, numbers among all nodes grown so far
    depths: Tensor  # [batch, nodes] int64
    survival: Tensor  # [batch, nodes] float32, 0 = absent

    def nodes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, parents, depths and survival of all nodes. # four [batch, nodes]"""
        return self.tokens.flatten(1), self.parents, self.depths, self.survival


class Picked(NamedTuple):
    """Nodes chosen as starts of the next forward, all [batch, starts]."""

    origin: StartNodes
    tokens: Tensor  # int64
    start: Tensor  # int64, index of the start whose block has the node
    position: Tensor  # int64, 0-based position in the block


def spread_classes(logits: Tensor, logprobs: Tensor) -> Tensor:
    """Conditional probabilities of ranks 1..10: softmax(logits) of a class, divided among its ranks in proportion to
    their draft probabilities, at most CEILING. # logits of classes [..., 4], logprobs [..., 10 or more], both float32
    -> [..., 10]"""
    members = members_of_classes(logits.device)
    draft, classes = logprobs[..., : len(CLASS_OF_RANK)].exp(), logits.softmax(-1)
    mass = (draft @ members).clamp(min=LEAST)
    return (draft * ((classes / mass) @ members.T)).clamp(max=CEILING)


def grow_lattice(
    origin: StartNodes, tokens: Tensor, predicted: Tensor, trust: Tensor, first_number: int, least: float, starts: int
) -> tuple[Lattice, Picked]:
    """The nodes of one forward's blocks: conditional = min(CEILING, predicted * trust), survival = its product along
    the path, 0 where it is below `least`. Also the `starts` nodes from which another block gains most: likely to be
    reached, and not continued by this forward, gain = survival * (1 - conditional of the next node on the spine).
    # tokens, predicted [batch, starts, block, rank]; trust [block, rank] float32; numbers of nodes count up from
    `first_number`"""
    wide, (block, ranks) = tokens.shape, trust.shape
    conditional = (predicted * trust).clamp(max=CEILING)
    spine = conditional[..., 0].cumprod(-1) * origin.survival[..., None]  # [batch, starts, block]
    above = torch.cat([origin.survival[..., None], spine[..., :-1]], dim=-1)
    reached = origin.depth[..., None] + torch.arange(1, block + 1, device=tokens.device)  # [batch, starts, block]
    survival = above[..., None] * conditional * (reached <= MAX_DEPTH)[..., None]
    numbers = torch.arange(tokens[0].numel(), device=tokens.device) + first_number
    on_spine = numbers.view(wide[1:])[..., 0].expand(wide[:3])
    parents = torch.cat([origin.node[..., None], on_spine[..., :-1]], dim=-1)
    depths = reached.clamp(max=MAX_DEPTH)
    lattice = Lattice(
        origin,
        tokens,
        parents[..., None].expand(wide).flatten(1),
        depths[..., None].expand(wide).flatten(1),
        (survival * (survival >= least)).flatten(1),
    )
    continued = pad(conditional[..., 1:, 0], (0, 1))  # likelihood that the spine's next node follows
    gain = torch.cat([(survival[..., 0] * (1.0 - continued))[..., None], survival[..., 1:]], dim=-1).flatten(1)
    best = gain.sort(dim=1, descending=True, stable=True).indices[:, :starts]
    position = best // ranks  # counted over the blocks of all starts
    begun = StartNodes(numbers[best], lattice.depths.gather(1, best), survival.flatten(1).gather(1, best))
    return lattice, Picked(begun, tokens.flatten(1).gather(1, best), position // block, position % block)


@cache
def members_of_classes(device: torch.device) -> Tensor:
    """One-hot classes of ranks, cached: a graph capture cannot copy from the host. # -> [rank, 4] float32"""
    return one_hot(torch.tensor(CLASS_OF_RANK, device=device), max(CLASS_OF_RANK) + 2).float()
