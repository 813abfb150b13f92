"""An n-gram memory: counts of the tokens that followed contexts, and the candidates for the next token, which come from
these counts and from a network's proposals and have one learnt probability each. `kernels/joint_tree.py` has the ops.

The hash of a context of 1, 2, 4 or 8 tokens selects a bucket of eight entries (one cache line). An entry holds 28 more
bits of the hash, a successor token and its count. A new successor replaces the entry of lowest count, and the bucket's
other counts decay, so that frequent and recent successors stay.

A sequence reads up to three parts: its own text (the prompt and its answer so far), the answer that its client
predicts, and past answers of its scope. The target's choice after a rejected node is counted in the text, too, with a
quarter of the weight of an occurrence: the target would emit it after such a context (as in Lookahead decoding, Fu et
al., 2024). The probability that a candidate is accepted, given that its parent is, is

    p = 1 / (1 + exp(-sum_g w[feature_g])),

over one feature of each group. For each part: the length of the longest context after which the token was counted, with
the token's share of the counts there; whether longer contexts have counts; the total count. Jointly: the probability
that the network claims, with the token's shares in the parts. At temperatures above 0: the sampling noise of the token
at its position, which is known beforehand (the network's claim includes it for the tokens that it proposes). If the
network proposes no children of a node, its nodes of the same depth stand in. Weights are learnt online, per scope, by
AdaGrad (Duchi et al., 2011) from candidates whose parent was accepted.

Legend: batch = the rows of one call; rows = sequences of the engine's table; scopes = groups of sequences that share
past answers. There are four weight sets: with or without network proposals for the parent's children, at temperature 0
or above."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import floor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.sample import hash_bits, row_keys
from kernels.trees import ROOT, DraftTree

ORDERS = (1, 2, 4, 8)
"""Lengths of the counted contexts; trees are as good with these four as with all lengths up to 8."""

CONTEXT = max(ORDERS)
WAYS = 8
"""Number of entries in a bucket."""

BUCKET_BYTES = 8 * WAYS
"""Size of a bucket in bytes: one cache line."""

PARTS = TEXT, PREDICTION, PAST = 0, 1, 2
NO_TOKEN = -1
"""Stands for a token before the first one of a sequence."""

WEIGHT_SETS = 4

TOKEN_BITS, COUNT_BITS, TAG_BITS = 20, 16, 28
BUCKET_SHIFT, TAG_SHIFT = 40, 12  # positions in a hash of the lowest bits of the bucket index and of the tag
MOST_COUNT = (1 << COUNT_BITS) - 1
SIGHTING = 16  # weight of one occurrence, in units of 1/16: counts can decay by an eighth
AFTER_REJECTED = SIGHTING // 4
_WORD = (1 << 64) - 1
_BUCKET_MASK = (1 << 64 - BUCKET_SHIFT) - 1

SHARE_EDGES = (0.15, 0.34, 0.6, 0.9, 0.99)  # bounds of a token's share of the counts after a context
TOTAL_EDGES = (1.5, 2.5, 4.5, 9.5, 30.0)  # bounds of the sum of counts after a context
STRENGTH_EDGES = (0.34, 0.9)  # bounds of a share in the joint group
LEAST_ODDS = -10  # lower bound of log2 of a claim's odds
CLAIM_CLASSES = 18  # nothing proposed at this depth, only other tokens proposed, or log2 of the claim's odds, up to 5
STRENGTHS = len(STRENGTH_EDGES) + 2
SHARES, TOTALS, LENGTHS = len(SHARE_EDGES) + 1, len(TOTAL_EDGES) + 1, len(ORDERS) + 1
OF_SHARE, OF_KNOWN, OF_TOTAL = len(ORDERS) * SHARES + 1, LENGTHS**2, TOTALS + 1
OF_PART = OF_SHARE + OF_KNOWN + OF_TOTAL
OF_CLAIM = CLAIM_CLASSES * STRENGTHS**2
NOISES = 13  # classes of sampling noise: none, or the number of leading zeros of its hash, which is seldom larger

FEATURES = len(PARTS) * OF_PART + OF_CLAIM + NOISES
"""Number of weights in a set."""

CHANCE_LIMITS = (0.005, 0.98)  # bounds of a probability: survival must fall along a path, but not underflow
MAX_DEPTH = 64


class Memory(NamedTuple):
    """All counts and weights of a memory, and the state of its rows, in tensors whose addresses never change."""

    entries: Tensor  # [buckets, WAYS] int64: tag, successor and count; an entry with count 0 is empty
    weights: Tensor  # [scopes, WEIGHT_SETS, FEATURES] float32
    squares: Tensor  # like weights: sums of squared gradients
    parts: Tensor  # [rows, PARTS, 2] int64, first bucket and number of buckets (a power of two, or 0 for none)
    scopes: Tensor  # [rows] int64
    warm: Tensor  # [rows] bool, whether the temperature is above 0
    stores: Tensor  # [rows] bool, whether the row's answer is counted in PAST and trains weights
    tails: Tensor  # [rows, CONTEXT] int64, last tokens of the sequence, the newest first
    predicted: Tensor  # [rows] int64, number of committed tokens that the client's prediction contained in context
    seeds: Tensor  # [rows] int64, seeds of the sampling noise
    roots: Tensor  # [rows] int64, absolute position of the last token
    alone: DraftTree  # [rows, nodes], trees last grown without a network
    network: DraftTree  # [rows, nodes], last proposals of the network, if any
    factors: Tensor  # [len(ORDERS) + CONTEXT] int64, odd factors of the context hash

    @staticmethod
    def empty(rows: int, buckets: int, scopes: int, nodes: int, device: torch.device | str = "cpu") -> "Memory":
        """Build an empty memory for trees of up to `nodes` nodes: no row has a part yet, and all weights are 0."""
        weights = torch.zeros(scopes, WEIGHT_SETS, FEATURES, device=device)
        number = torch.zeros(rows, dtype=torch.int64, device=device)
        return Memory(
            entries=torch.zeros(buckets, WAYS, dtype=torch.int64, device=device),
            weights=weights,
            squares=torch.ones_like(weights),
            parts=number.new_zeros(rows, len(PARTS), 2),
            scopes=number.clone(),
            warm=number.bool(),
            stores=number == 0,
            tails=number.new_full((rows, CONTEXT), NO_TOKEN),
            predicted=number.clone(),
            seeds=number.clone(),
            roots=number.clone(),
            alone=DraftTree.padding(rows, nodes, device),
            network=DraftTree.padding(rows, nodes, device),
            factors=_hash_factors().to(device),
        )


@dataclass(slots=True)
class Sighting:
    """Occurrences of a token in one part, after the longest context that it was counted after."""

    order: int = -1  # index in ORDERS of that context's length; -1 if the token was not counted
    count: float = 0.0  # occurrences of the token after the context
    total: float = 0.0  # occurrences of all successors of the context

    @property
    def share(self) -> float:
        """Share of the token among all successors of the context; 0 without any."""
        return self.count / self.total if self.total else 0.0


@dataclass(slots=True)
class Candidate:
    """A candidate for the next token, with its occurrences in each part and the network's claim."""

    token: int
    node: int = -1  # its node in the network's tree; -1 if the network does not propose it as a child of the parent
    claim: float = 0.0  # the network's conditional probability of the token, given its parent
    seen: tuple[Sighting, ...] = field(default_factory=lambda: tuple(Sighting() for _ in PARTS))


@dataclass(slots=True)
class GrownNode:
    """A node of the tree under construction, or of the network's tree."""

    token: int
    parent: int
    depth: int
    survival: float
    context: tuple[int, ...] = ()
    proposed: int | None = None  # its node in the network's tree, ROOT for the root; None if it is not in that tree


class RowReader:
    """Reads and updates the memory for one row: its parts, its scope's weights, and the network's proposals."""

    def __init__(self, memory: Memory, row: int) -> None:
        self.memory, self.row = memory, row
        self._parts = memory.parts[row].tolist()
        self._factors = memory.factors.tolist()
        self._draws = bool(memory.warm[row])
        self.network = nodes_of(memory.network, row)

    def tail(self) -> tuple[int, ...]:
        """Return the last tokens of the sequence, the newest first."""
        return tuple(self.memory.tails[self.row].tolist())

    def places(self, context: tuple[int, ...], part: int) -> list[tuple[int, int]]:
        """Return bucket and tag of the context of each order; the list ends at the first order that is longer than the
        sequence, and is empty if the row has no such part."""
        (first, buckets), found, hashed = self._parts[part], [], 0
        for order, (length, before) in enumerate(zip(ORDERS, (0, *ORDERS), strict=False)):
            for age in range(before, length):
                hashed += (context[age] + 1) * self._factors[len(ORDERS) + age]
            own = (hashed + self._factors[order]) & _WORD
            if not buckets or context[length - 1] == NO_TOKEN:
                break
            found.append((first + (own >> BUCKET_SHIFT & (buckets - 1)), own >> TAG_SHIFT & ((1 << TAG_BITS) - 1)))
        return found

    def add(self, context: tuple[int, ...], part: int, token: int, sighting: int = SIGHTING) -> None:
        """Count an occurrence of the token after the context of each order; `sighting` is its weight in units of
        1/16."""
        for bucket, tag in self.places(context, part):
            entries = [entry & _WORD for entry in self.memory.entries[bucket].tolist()]
            name = tag << (64 - TAG_BITS) | token << COUNT_BITS
            known = [way for way, entry in enumerate(entries) if entry & ~MOST_COUNT == name and entry & MOST_COUNT]
            place = known[0] if known else min(range(WAYS), key=lambda way: entries[way] & MOST_COUNT)
            if known:
                entries[place] = name | min(MOST_COUNT, (entries[place] & MOST_COUNT) + sighting)
            else:
                if entries[place] & MOST_COUNT:
                    entries = [entry - ((entry & MOST_COUNT) >> 3) for entry in entries]
                entries[place] = name | sighting
            self.memory.entries[bucket] = torch.tensor([_signed(entry) for entry in entries])

    def candidates(
        self, context: tuple[int, ...], proposed: int | None, depth: int
    ) -> list[tuple[Candidate, list[int]]]:
        """Collect the candidates for the next token at a depth, with the features of each. `proposed` is the parent's
        node in the network's tree, or None."""
        found: dict[int, Candidate] = {}
        known = [self._see(context, part, found) for part in PARTS]
        knows, claims = self.knows(proposed), False
        for number, node in enumerate(self.network):
            if node.parent == proposed if knows else node.depth == depth:
                above = 1.0 if node.parent == ROOT else self.network[node.parent].survival
                one = found.setdefault(node.token, Candidate(node.token))
                one.claim = max(one.claim, float(np.float32(node.survival) / np.float32(above)))
                one.node = number if knows else -1
                claims = True
        drawn = zip(found.values(), self._noise(list(found), depth), strict=True)
        return [(one, _features(one, known, noise, claims=claims)) for one, noise in drawn]

    def knows(self, proposed: int | None) -> bool:
        """Whether the network proposes children of its node `proposed`."""
        return proposed is not None and any(node.parent == proposed for node in self.network)

    def weights(self, *, knows: bool) -> tuple[Tensor, Tensor]:
        """Return views of the row's weights and of their sums of squared gradients. `knows`: whether the network
        proposes children of the parent. # both [FEATURES]"""
        scope, kind = int(self.memory.scopes[self.row]), 2 * int(self.memory.warm[self.row]) + knows
        return self.memory.weights[scope, kind], self.memory.squares[scope, kind]

    def _noise(self, tokens: list[int], depth: int) -> list[int]:
        """Compute the class of each token's sampling noise at that depth, by the leading zeros of its hash, each of
        which adds log 2 to the noise (`kernels.sample`). The class is 0 at temperature 0."""
        if not self._draws:
            return [0] * len(tokens)
        row = slice(self.row, self.row + 1)
        keys = row_keys(self.memory.seeds[row], self.memory.roots[row] + depth)
        bits = hash_bits(keys, torch.tensor(tokens, dtype=torch.int32, device=keys.device))
        hashes = [value & 0xFFFFFFFF for value in bits[0].tolist()]
        return [1 if own >= 3 << 30 else min(34 - own.bit_length(), NOISES - 1) for own in hashes]

    def _see(self, context: tuple[int, ...], part: int, found: dict[int, Candidate]) -> int:
        """Add the tokens that the part has counted after the context to `found`; returns the longest order that has
        counts, or -1."""
        longest = -1
        for order, (bucket, tag) in reversed(list(enumerate(self.places(context, part)))):
            entries = [entry & _WORD for entry in self.memory.entries[bucket].tolist()]
            seen = [entry for entry in entries if entry >> (64 - TAG_BITS) == tag and entry & MOST_COUNT]
            total = sum(entry & MOST_COUNT for entry in seen) / SIGHTING
            longest = max(longest, order) if seen else longest
            for entry in seen:
                token = entry >> COUNT_BITS & ((1 << TOKEN_BITS) - 1)
                sighting = found.setdefault(token, Candidate(token)).seen[part]
                if sighting.order < 0:
                    sighting.order, sighting.count, sighting.total = order, (entry & MOST_COUNT) / SIGHTING, total
        return longest


def _features(one: Candidate, known: Sequence[int], noise: int, *, claims: bool) -> list[int]:
    """Compute the index of a candidate's weight in each group. `known`: longest order with counts in each part;
    `claims`: whether the network proposes any token at this position."""
    features, base = [], 0
    for part, seen in zip(PARTS, one.seen, strict=True):
        shared = seen.order * SHARES + _num_below(seen.share, SHARE_EDGES)
        features.append(base + (OF_SHARE - 1 if seen.order < 0 else shared))
        features.append(base + OF_SHARE + (known[part] + 1) * LENGTHS + seen.order + 1)
        total = TOTALS if seen.order < 0 else _num_below(seen.total, TOTAL_EDGES)
        features.append(base + OF_SHARE + OF_KNOWN + total)
        base += OF_PART
    claim = int(claims)
    if one.claim > 0:
        odds = np.log2(np.float32(one.claim) / max(np.float32(1e-6), 1 - np.float32(one.claim)))
        claim = 2 + min(max(floor(odds) - LEAST_ODDS, 0), CLAIM_CLASSES - 3)
    own = max(_strength_class(one.seen[TEXT]), _strength_class(one.seen[PREDICTION]))
    features.append(base + (claim * STRENGTHS + own) * STRENGTHS + _strength_class(one.seen[PAST]))
    return [*features, base + OF_CLAIM + (0 if one.claim > 0 else noise)]


def _strength_class(seen: Sighting) -> int:
    return 0 if seen.order < 0 else 1 + _num_below(seen.share, STRENGTH_EDGES)


def past_lines(memory: Memory, rows: Tensor, tokens: Tensor) -> Tensor:
    """Read the entries of the rows' PAST parts in the buckets of the contexts of committed tokens, before
    `learn_committed` counts these. Zeros for a row without such a part; arbitrary entries of the part for padding, and
    for contexts that are longer than the sequence. # rows [batch] int64; tokens [batch, width] int64 -> [batch, width,
    len(ORDERS), WAYS] int64"""
    first, buckets = memory.parts[rows, PAST].view(-1, 2, 1, 1).unbind(1)
    mask = (buckets - 1).clamp(min=0)
    places = first + (bucket_hashes(memory.tails[rows], tokens) & mask)
    return memory.entries[places] * (buckets > 0)[..., None]


def bucket_hashes(tails: Tensor, tokens: Tensor) -> Tensor:
    """Return for the context of each token that part of the hashes whose lowest bits select a bucket
    (`RowReader.places`). # tails [batch, CONTEXT] int64, the newest first; tokens [batch, width] int64 -> [batch,
    width, len(ORDERS)] int64"""
    factors, own = _order_factors(tokens.device)
    contexts = (torch.cat([tails.flip(1), tokens[:, :-1]], dim=1) + 1).unfold(1, CONTEXT, 1)
    return ((contexts[:, :, None] * factors).sum(-1) + own) >> BUCKET_SHIFT & _BUCKET_MASK


@cache
def _order_factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the factor of each token of a context, the oldest first, and of each order.
    # -> [len(ORDERS), CONTEXT], [len(ORDERS)] int64"""
    own, ages = _hash_factors().split([len(ORDERS), CONTEXT])
    within = torch.arange(CONTEXT) < torch.tensor(ORDERS)[:, None]
    return (ages * within).flip(1).to(device), own.to(device)


def _hash_factors() -> Tensor:
    """Draw the odd factors of the context hash: one for each order, and one for each age of a token in a context."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(-(2**62), 2**62, (len(ORDERS) + CONTEXT,), generator=generator) | 1


def then(context: tuple[int, ...], token: int) -> tuple[int, ...]:
    """Return the context after one more token."""
    return token, *context[:-1]


def _num_below(value: float, edges: Sequence[float]) -> int:
    """Count the edges below a value."""
    return sum(value > edge for edge in edges)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def nodes_of(tree: DraftTree, line: int) -> list[GrownNode]:
    """Read the nodes of tree `line` of a batch."""
    count = int(tree.num_nodes[line])
    columns = (values[line, :count].tolist() for values in tree[:4])
    return [GrownNode(*values) for values in zip(*columns, strict=True)]


def write_nodes(tree: DraftTree, line: int, nodes: list[GrownNode]) -> None:
    """Write nodes as tree `line` of a batch."""
    tree.num_nodes[line] = len(nodes)
    for place, node in enumerate(nodes):
        for values, value in zip(tree[:4], (node.token, node.parent, node.depth, node.survival), strict=True):
            values[line, place] = value
