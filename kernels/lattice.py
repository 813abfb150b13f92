"""Turns a drafter's logits into nodes of its draft tree, one forward after another: features for the rank head,
probabilities of ranks, parents and survival of nodes, and the nodes at which the next forward's blocks start.

The rank head reads the log probabilities of the top ranks, the gaps to the first rank, and how broad the rest is:

    logs_1..10 = top logits - lse,   gaps = logs_1 - logs_(2, 3, 5),   exp(logs_1),   entropy = lse - sum_v q(v) z(v)

with z the logits, lse their log-sum-exp and q = exp(z - lse).

Each forward runs some blocks, which start at nodes of the previous forward. A block's first ranks form its spine; the
other ranks are leaves. With blocks of one position this is a beam search: all nodes are leaves, and the likeliest paths
continue. `plan_growth` is one op from a drafter's waiting entries to the tree, for networks that draft one block per
sequence. Its reference is the composition of ops in drafters/network/blocks.py, which also runs whatever a kernel does
not support. Legend: batch, starts = blocks of one forward per sequence, block = positions of a block, rank = TOP, nodes
= starts * block * rank, hidden, width = of the tapped features.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from kernels.entries import EntryTables
from kernels.layers import Product, Weight
from kernels.sample import Filters
from kernels.survival import CEILING, Proposed
from kernels.tree_attention import MAX_DEPTH
from kernels.trees import ROOT, DraftTree

TOP = 10
"""Number of top ranks of a distribution that become features and candidates."""

GAPS = (1, 2, 4)
"""0-based ranks whose gap to the first rank is a feature."""

NUM_FEATURES = TOP + len(GAPS) + 2


def rank_features(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the rank head's features, and the token ids of ranks 1 to TOP; the order of equal logits is undefined.
    # scores [..., vocab] -> [..., NUM_FEATURES] float32, [..., TOP] int64"""
    scores = scores.float()
    top = scores.topk(TOP, dim=-1)
    total = scores.logsumexp(-1, keepdim=True)
    logs = top.values - total  # [..., TOP]
    gaps = logs[..., :1] - torch.stack([logs[..., rank] for rank in GAPS], dim=-1)
    entropy = total - (scores.softmax(-1) * scores).sum(-1, keepdim=True)
    return torch.cat([logs, gaps, logs[..., :1].exp(), entropy], dim=-1), top.indices


CLASS_OF_RANK = (0, 1, 1, 1, 2, 2, 2, 2, 2, 2)
"""The rank head's class of each of the ranks 1 to 10; class 3 is beyond rank 10."""

LEAST = 1e-9
"""Lower bound of a divisor, or of the argument of a logarithm."""


class StartNodes(NamedTuple):
    """Nodes (or roots) at which one forward's blocks start; all tensors [batch, starts]."""

    node: Tensor  # int64, index among all nodes grown so far, ROOT for the root
    depth: Tensor  # int64, 0 for the root
    survival: Tensor  # float32, 1 for the root; 0 for padding, whose block gets no nodes

    @staticmethod
    def root(batch: int, device: torch.device) -> "StartNodes":
        """Build the starts of the first forward: the root of each sequence. # [batch, 1]"""
        zeros = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        return StartNodes(zeros + ROOT, zeros, zeros + 1.0)


class Lattice(NamedTuple):
    """Nodes that one forward's blocks add to the tree."""

    origin: StartNodes
    tokens: Tensor  # [batch, starts, block, rank] int64
    parents: Tensor  # [batch, nodes] int64, indices among all nodes grown so far
    depths: Tensor  # [batch, nodes] int64
    survival: Tensor  # [batch, nodes] float32, 0 = absent

    def nodes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens, parents, depths and survival of all nodes. # four [batch, nodes]"""
        return self.tokens.flatten(1), self.parents, self.depths, self.survival


class Picked(NamedTuple):
    """Nodes chosen as the starts of the next forward's blocks; all tensors [batch, starts]."""

    origin: StartNodes
    tokens: Tensor  # int64
    start: Tensor  # int64, index of this forward's start whose block contains the node
    position: Tensor  # int64, 0-based position of the node in that block


def spread_classes(logits: Tensor, logprobs: Tensor) -> Tensor:
    """Compute the conditional probabilities of ranks 1 to 10: each class's softmax(logits), divided among its ranks in
    proportion to their draft probabilities, at most CEILING.
    # logits of classes [..., 4], draft logprobs [..., 10 or more], both float32 -> [..., 10]"""
    members = members_of_classes(logits.device)
    draft, classes = logprobs[..., : len(CLASS_OF_RANK)].exp(), logits.softmax(-1)
    mass = (draft @ members).clamp(min=LEAST)
    return (draft * ((classes / mass) @ members.T)).clamp(max=CEILING)


def grow_lattice(
    origin: StartNodes, tokens: Tensor, predicted: Tensor, trust: Tensor, first_number: int, least: float, starts: int
) -> tuple[Lattice, Picked]:
    """Build the nodes of one forward's blocks, and pick the `starts` nodes at which another block gains most.

    conditional = min(CEILING, predicted * trust); survival = its product along the path, 0 where that is below `least`;
    gain = survival * (1 - conditional of the next node on the spine): the node is likely reached, and this forward does
    not continue it. New nodes are numbered from `first_number` on.
    # tokens, predicted [batch, starts, block, rank]; trust [block, rank] float32
    """
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
    continued = pad(conditional[..., 1:, 0], (0, 1))  # probability of the spine's next node, 0 at the block's end
    gain = torch.cat([(survival[..., 0] * (1.0 - continued))[..., None], survival[..., 1:]], dim=-1).flatten(1)
    best = gain.sort(dim=1, descending=True, stable=True).indices[:, :starts]
    position = best // ranks  # index over the positions of all blocks
    begun = StartNodes(numbers[best], lattice.depths.gather(1, best), survival.flatten(1).gather(1, best))
    return lattice, Picked(begun, tokens.flatten(1).gather(1, best), position // block, position % block)


@cache
def members_of_classes(device: torch.device) -> Tensor:
    """Return the one-hot class of each rank, cached because a graph capture cannot copy from the host.
    # -> [rank, 4] float32"""
    return one_hot(torch.tensor(CLASS_OF_RANK, device=device), max(CLASS_OF_RANK) + 2).float()


class BlockNetwork(NamedTuple):
    """One version of a network's weights, bound to the ops of their device."""

    condition: Product  # [width] -> [hidden]
    known: Product  # [2 * hidden] -> [hidden], of the normed condition and token
    head: Product  # [hidden] -> [draft_vocab]
    rank_hidden: Product
    rank_classes: Product
    layers: Sequence[Any]  # `DecoderLayer`s
    shifts: Sequence[Product]  # between the layers, or none; [2 * hidden] -> [hidden]
    feature_norms: Tensor | None  # [width], of the parts of the features that are normed separately
    condition_norm: Tensor  # [hidden], as the next two and the last
    token_norm: Tensor
    output_norm: Tensor
    queries: Tensor  # [block, hidden], what is added to the known part of each entry's input
    rank_norm: Tensor
    parts: int  # of the features
    broadcast: bool  # whether all entries of a block get the known part, not only the first
    epsilon: float  # of all norms but the rank head's
    rank_epsilon: float
    feature_scale: float  # of the rank head's features


class BlockTables(NamedTuple):
    """Tables that the growth reads and writes; their addresses never change."""

    entries: EntryTables
    pool: Tensor  # [layers, 2, places, kv_heads, dim]
    scratch: Tensor  # [sequences, live] int64, places in the pool of a growing block's entries
    rotary: Tensor  # [2, positions, dim]
    embedding: Weight  # [vocab, hidden]
    d2t: Tensor  # [draft_vocab] int64
    proposed: Proposed  # trees that are kept for the calibration
    buckets: Tensor  # [block, rank] int64, of `rates`
    rates: Tensor  # [buckets] float32, correction factors of conditional probabilities
    least: float  # survival below which a node is dropped


class GrownTree(NamedTuple):
    """The trees of a batch, and what was computed for them; valid until the next call."""

    tree: DraftTree  # [batch, nodes]
    states: Tensor  # [batch, block, hidden]
    logits: Tensor  # [batch, block, draft_vocab]


class HostSizes(NamedTuple):
    """Properties of a batch that the host knows before trees grow, and that select a captured graph."""

    waiting: int  # maximum number of waiting entries of a sequence
    noise: int  # level: 0 if no temperature is above 0, 2 if filters may drop tokens, else 1


class Keys(NamedTuple):
    """The rows of a batch and the keys of its sampling noise; all [batch]."""

    rows: Tensor  # int64
    seeds: Tensor  # int64
    temperatures: Tensor  # float32
    roots: Tensor  # int64, absolute positions
    filters: Filters  # read at noise level 2 only


GrowBlock = Callable[[Keys, HostSizes], GrownTree]
"""Runs the waiting entries of each sequence, and the block at the newest of them."""


def plan_growth(network: BlockNetwork, tables: BlockTables, max_nodes: int) -> GrowBlock | None:
    """Plan the growth of trees of at most `max_nodes` nodes. Returns None where no kernel supports it."""
    return None
