"""Which tokens followed which contexts, and one tree of what may follow a text now: n-gram counts of several texts and
what a network proposes, joined by one learnt distribution.

A context of 1, 2, 4 or 8 tokens names a bucket of eight places by its hash. A place holds 28 further bits of the hash,
a successor and how often it was seen. A new successor takes the place with the fewest sightings, and the others of its
bucket fade then, so that what is frequent and recent stays; a bucket is one cache line, whatever is held.

A sequence reads up to three parts: its own text (the prompt and its answer so far), the answer that its client
predicts, and past answers of its scope. What the target chose after a node that it rejected counts in the text, too, at
a quarter of a sighting: it is what the target says after such a context (as in Lookahead decoding, Fu et al., 2024).
The chance of a candidate given that its parent is accepted is

    p = 1 / (1 + exp(-sum_g w[feature_g])),

over one feature of each group: per part, how long the longest context is behind which the token was seen, and its share
of what was seen there; whether longer contexts are known; how much was seen in all; and, jointly, what the network
claims and how strongly texts agree; and, where tokens are drawn, the candidate's sampling noise at its position, which
is known beforehand and which a network's claim includes. Where the network proposes no children of a node, it claims
for them what it proposes at their depth under other nodes. Weights are learnt online by AdaGrad (Duchi et al., 2011)
from candidates whose parent came true, per scope.

Legend: batch = some rows; rows = sequences of the engine's table; scopes = who shares past answers; kinds = 4 sets of
weights: whether the network proposes children of the parent, and 2 more where the temperature is above 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import floor, sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.sample import hash_bits, row_keys
from kernels.trees import ROOT, DraftTree

ORDERS = (1, 2, 4, 8)
"""Lengths of contexts: of these four trees are as good as of all lengths up to 8."""

CONTEXT = max(ORDERS)
WAYS = 8
"""Places of a bucket."""

BUCKET_BYTES = 8 * WAYS
"""A cache line."""

PARTS = TEXT, PREDICTION, PAST = 0, 1, 2
NO_TOKEN = -1
"""Stands before the first token of a text."""

KINDS = 4

_TOKEN_BITS, _COUNT_BITS, _TAG_BITS = 20, 16, 28
_BUCKET_SHIFT, _TAG_SHIFT = 40, 12  # of a hash
_MOST = (1 << _COUNT_BITS) - 1
_SIGHTING = 16  # in 1/16, so that counts can fade by an eighth
_AFTER_REJECTED = _SIGHTING // 4
_WORD = (1 << 64) - 1

_SHARE_EDGES = (0.15, 0.34, 0.6, 0.9, 0.99)  # of what was seen behind a context
_TOTAL_EDGES = (1.5, 2.5, 4.5, 9.5, 30.0)  # sightings behind a context
_STRENGTH_EDGES = (0.34, 0.9)  # of a share, where it stands beside a claim
_LEAST_ODDS = -10  # log2 of a claim's
_CLAIMS = 18  # nothing proposed at this depth, not this token, and log2 of the odds up to 5
_STRENGTHS = len(_STRENGTH_EDGES) + 2
_SHARES, _TOTALS, _LENGTHS = len(_SHARE_EDGES) + 1, len(_TOTAL_EDGES) + 1, len(ORDERS) + 1
_OF_SHARE, _OF_KNOWN, _OF_TOTAL = len(ORDERS) * _SHARES + 1, _LENGTHS**2, _TOTALS + 1
_OF_PART = _OF_SHARE + _OF_KNOWN + _OF_TOTAL
_OF_CLAIM = _CLAIMS * _STRENGTHS**2
_NOISES = 13  # of none, and by zeros that the noise's hash begins with: of 2^10 tokens one has more than are told apart

FEATURES = len(PARTS) * _OF_PART + _OF_CLAIM + _NOISES
"""Weights of a kind."""

_LIMITS = (0.005, 0.98)  # of a chance: survival falls along a path, and a long one does not underflow
_MAX_DEPTH = 64


class Memory(NamedTuple):
    """Everything that is remembered, in tensors that stay where they are."""

    entries: Tensor  # [buckets, WAYS] int64: tag, successor and count; a count of 0 is an empty place
    weights: Tensor  # [scopes, KINDS, FEATURES] float32
    squares: Tensor  # like weights, summed squares of their gradients
    parts: Tensor  # [rows, PARTS, 2] int64, first bucket and number of buckets (a power of two, or 0 for none)
    scopes: Tensor  # [rows] int64
    warm: Tensor  # [rows] bool, whether tokens are drawn, at a temperature above 0
    stores: Tensor  # [rows] bool, whether answers are remembered, and teach weights
    tails: Tensor  # [rows, CONTEXT] int64, last tokens of the text, the newest first
    predicted: Tensor  # [rows] int64, committed tokens that the client's prediction had in their place
    seeds: Tensor  # [rows] int64, of the sampling noise
    roots: Tensor  # [rows] int64, absolute position of the last token
    alone: DraftTree  # [rows, nodes], last trees without a network's proposals
    network: DraftTree  # [rows, nodes], and what the network proposed, if it was asked
    factors: Tensor  # [len(ORDERS) + CONTEXT] int64, odd numbers of the hash

    @staticmethod
    def empty(rows: int, buckets: int, scopes: int, nodes: int, device: torch.device | str = "cpu") -> "Memory":
        """Room for so many rows, with trees of up to `nodes`; no row has a part yet, and all weights are 0."""
        weights = torch.zeros(scopes, KINDS, FEATURES, device=device)
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


def add_text(memory: Memory, row: int, part: int, tokens: Tensor) -> None:
    """Count each token behind the ones before it, beginning at the end of the row's text, which the tokens continue
    where the part is TEXT. # tokens [count] int64"""
    reader = _RowReader(memory, row)
    context = reader.tail()
    for token in tokens.tolist():
        reader.add(context, part, token)
        context = _then(context, token)
    if part == TEXT:
        memory.tails[row] = torch.tensor(context)


def grow_joint_tree(memory: Memory, rows: Tensor, network: DraftTree | None, max_nodes: int, least: float) -> DraftTree:
    """For each text the nodes that are likeliest to be accepted, best first, of all that its parts and the network
    propose; none that survives with a probability below `least`. What the network proposes, or that it does not, is
    kept for `learn_committed`. # rows [batch] int64, network [batch, nodes]"""
    lines = []
    for line, row in enumerate(rows.tolist()):
        kept = memory.network if network is not None else memory.alone
        memory.network.num_nodes[row] = 0
        if network is not None:
            _write(kept, row, _nodes_of(network, line))
        nodes = _grown(_RowReader(memory, row), max_nodes, least)
        if network is None:
            _write(kept, row, nodes)
        lines.append(nodes)
    return _tree(lines, max_nodes, rows.device)


def learn_committed(
    memory: Memory, rows: Tensor, tokens: Tensor, counts: Tensor, verified: DraftTree, choices: Tensor, rate: float
) -> Tensor:
    """Count what was committed in each text and, where the row stores, in its scope's past answers, whose weights learn
    then which candidates came true; and in the text what the target chose after nodes that it rejected. Returns how
    many accepted tokens (all but the last of each row) the trees without the network had, how many there are, how many
    were committed, how many past answers remember from now on, and, for each order, how many they had seen already,
    behind a context of that length and no longer one.
    # rows, counts [batch] int64; tokens [batch, depth + 1] int64; choices [batch, nodes + 1] int64, after the root and
    after each verified node -> [4 + len(ORDERS)] int64"""
    given = list(zip(*(values.tolist() for values in (rows, tokens, counts)), strict=True))
    right, known = 0, [0] * len(ORDERS)
    for line, (row, text, count) in enumerate(given):
        reader = _RowReader(memory, row)
        before = reader.tail()
        right += _learnt(reader, text[:count], rate, known)
        _count_rejected(reader, before, _nodes_of(verified, line), choices[line].tolist())
        memory.alone.num_nodes[row] = memory.network.num_nodes[row] = 0  # a step may commit without having grown
    accepted = sum(max(0, count - 1) for *_, count in given)
    remembered = sum(count for row, _, count in given if memory.stores[row] and memory.parts[row, PAST, 1])
    committed = sum(count for *_, count in given)
    return torch.tensor([right, accepted, committed, remembered, *known], device=rows.device)


@dataclass(slots=True)
class Sighting:
    """Where a part has seen a token: behind the longest context that it has seen it behind."""

    order: int = -1
    count: float = 0.0
    total: float = 0.0  # of all successors there

    @property
    def share(self) -> float:
        return self.count / self.total if self.total else 0.0


@dataclass(slots=True)
class Candidate:
    """A token that may follow."""

    token: int
    node: int = -1  # of the network's tree
    claim: float = 0.0  # the network's chance, given the parent
    seen: tuple[Sighting, ...] = field(default_factory=lambda: tuple(Sighting() for _ in PARTS))


@dataclass(slots=True)
class _Node:
    token: int
    parent: int
    depth: int
    survival: float
    context: tuple[int, ...] = ()
    proposed: int | None = None  # which node of the network's tree it is: ROOT for the root, None for none


class _RowReader:
    """One row's view of the memory."""

    def __init__(self, memory: Memory, row: int) -> None:
        self.memory, self.row = memory, row
        self._parts = memory.parts[row].tolist()
        self._factors = memory.factors.tolist()
        self._draws = bool(memory.warm[row])
        self.network = _nodes_of(memory.network, row)

    def tail(self) -> tuple[int, ...]:
        return tuple(self.memory.tails[self.row].tolist())

    def places(self, context: tuple[int, ...], part: int) -> list[tuple[int, int]]:
        """Bucket and tag of each order for which the text is long enough."""
        (first, buckets), found, hashed = self._parts[part], [], 0
        for order, (length, before) in enumerate(zip(ORDERS, (0, *ORDERS), strict=False)):
            for age in range(before, length):
                hashed += (context[age] + 1) * self._factors[len(ORDERS) + age]
            own = (hashed + self._factors[order]) & _WORD
            if not buckets or context[length - 1] == NO_TOKEN:
                break
            found.append((first + (own >> _BUCKET_SHIFT & (buckets - 1)), own >> _TAG_SHIFT & ((1 << _TAG_BITS) - 1)))
        return found

    def add(self, context: tuple[int, ...], part: int, token: int, sighting: int = _SIGHTING) -> None:
        """Count a sighting of the token behind each context."""
        for bucket, tag in self.places(context, part):
            entries = [entry & _WORD for entry in self.memory.entries[bucket].tolist()]
            name = tag << (64 - _TAG_BITS) | token << _COUNT_BITS
            known = [way for way, entry in enumerate(entries) if entry & ~_MOST == name and entry & _MOST]
            place = known[0] if known else min(range(WAYS), key=lambda way: entries[way] & _MOST)
            if known:
                entries[place] = name | min(_MOST, (entries[place] & _MOST) + sighting)
            else:
                if entries[place] & _MOST:
                    entries = [entry - ((entry & _MOST) >> 3) for entry in entries]
                entries[place] = name | sighting
            self.memory.entries[bucket] = torch.tensor([_signed(entry) for entry in entries])

    def candidates(
        self, context: tuple[int, ...], proposed: int | None, depth: int
    ) -> list[tuple[Candidate, list[int]]]:
        """What may follow at a depth, and the features of each."""
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
        """Whether the network proposes children of that node."""
        return proposed is not None and any(node.parent == proposed for node in self.network)

    def weights(self, *, knows: bool) -> tuple[Tensor, Tensor]:
        """Weights and squares of a kind. # both [FEATURES]"""
        scope, kind = int(self.memory.scopes[self.row]), 2 * int(self.memory.warm[self.row]) + knows
        return self.memory.weights[scope, kind], self.memory.squares[scope, kind]

    def _noise(self, tokens: list[int], depth: int) -> list[int]:
        """How large each token's sampling noise at that depth is: by zeros that its hash begins with, each of which
        adds log 2 to the noise (`kernels.sample`); 0 where none is drawn."""
        if not self._draws:
            return [0] * len(tokens)
        row = slice(self.row, self.row + 1)
        keys = row_keys(self.memory.seeds[row], self.memory.roots[row] + depth)
        bits = hash_bits(keys, torch.tensor(tokens, dtype=torch.int32, device=keys.device))
        hashes = [value & 0xFFFFFFFF for value in bits[0].tolist()]
        return [1 if own >= 3 << 30 else min(34 - own.bit_length(), _NOISES - 1) for own in hashes]

    def _see(self, context: tuple[int, ...], part: int, found: dict[int, Candidate]) -> int:
        """Note what the part has seen behind the context; returns the longest order that it knows, or -1."""
        longest = -1
        for order, (bucket, tag) in reversed(list(enumerate(self.places(context, part)))):
            entries = [entry & _WORD for entry in self.memory.entries[bucket].tolist()]
            seen = [entry for entry in entries if entry >> (64 - _TAG_BITS) == tag and entry & _MOST]
            total = sum(entry & _MOST for entry in seen) / _SIGHTING
            longest = max(longest, order) if seen else longest
            for entry in seen:
                token = entry >> _COUNT_BITS & ((1 << _TOKEN_BITS) - 1)
                sighting = found.setdefault(token, Candidate(token)).seen[part]
                if sighting.order < 0:
                    sighting.order, sighting.count, sighting.total = order, (entry & _MOST) / _SIGHTING, total
        return longest


def _features(one: Candidate, known: Sequence[int], noise: int, *, claims: bool) -> list[int]:
    """Which weight of each group speaks for a candidate; `claims`: whether the network proposes any in its place."""
    features, base = [], 0
    for part, seen in zip(PARTS, one.seen, strict=True):
        shared = seen.order * _SHARES + _passed(seen.share, _SHARE_EDGES)
        features.append(base + (_OF_SHARE - 1 if seen.order < 0 else shared))
        features.append(base + _OF_SHARE + (known[part] + 1) * _LENGTHS + seen.order + 1)
        total = _TOTALS if seen.order < 0 else _passed(seen.total, _TOTAL_EDGES)
        features.append(base + _OF_SHARE + _OF_KNOWN + total)
        base += _OF_PART
    claim = int(claims)
    if one.claim > 0:
        odds = np.log2(np.float32(one.claim) / max(np.float32(1e-6), 1 - np.float32(one.claim)))
        claim = 2 + min(max(floor(odds) - _LEAST_ODDS, 0), _CLAIMS - 3)
    own = max(_strength(one.seen[TEXT]), _strength(one.seen[PREDICTION]))
    features.append(base + (claim * _STRENGTHS + own) * _STRENGTHS + _strength(one.seen[PAST]))
    return [*features, base + _OF_CLAIM + (0 if one.claim > 0 else noise)]


def _strength(seen: Sighting) -> int:
    return 0 if seen.order < 0 else 1 + _passed(seen.share, _STRENGTH_EDGES)


def _chance(weights: Tensor, features: list[int]) -> float:
    low, high = _LIMITS
    score = sum(weights[features].numpy(), np.float32(0))  # in the order of groups, as the twins add
    return float(np.clip(1 / (1 + np.exp(-score)), np.float32(low), np.float32(high)))


def _grown(reader: _RowReader, most: int, least: float) -> list[_Node]:
    """Best first: the likeliest node that is not expanded yet goes on. The likeliest nodes are held: a better one takes
    the place of the least likely, which has no child among them, for a child is less likely than its parent."""
    nodes: list[_Node] = []
    expanded = set[int]()
    number, parent = ROOT, _Node(NO_TOKEN, ROOT, 0, 1.0, reader.tail(), ROOT)
    while True:
        if parent.depth < _MAX_DEPTH:
            for node in _children(reader, parent, number):
                if node.survival >= least:
                    _hold(nodes, expanded, node, most)
        waiting = [place for place in range(len(nodes)) if place not in expanded]
        if not waiting:
            break
        number = max(waiting, key=lambda place: nodes[place].survival)
        expanded.add(number)
        parent = nodes[number]
    order = sorted(range(len(nodes)), key=lambda place: -nodes[place].survival)
    numbers = {ROOT: ROOT, **{place: new for new, place in enumerate(order)}}
    return [_Node(n.token, numbers[n.parent], n.depth, n.survival) for n in (nodes[place] for place in order)]


def _children(reader: _RowReader, parent: _Node, number: int) -> Iterator[_Node]:
    weights, _ = reader.weights(knows=reader.knows(parent.proposed))
    for one, features in reader.candidates(parent.context, parent.proposed, parent.depth + 1):
        survival = float(np.float32(parent.survival) * np.float32(_chance(weights, features)))
        proposed = one.node if one.node >= 0 else None
        yield _Node(one.token, number, parent.depth + 1, survival, _then(parent.context, one.token), proposed)


def _hold(nodes: list[_Node], expanded: set[int], node: _Node, most: int) -> None:
    if len(nodes) < most:
        nodes.append(node)
        return
    place = min(range(most), key=lambda place: nodes[place].survival)
    if node.survival > nodes[place].survival:
        nodes[place] = node
        expanded.discard(place)


def _learnt(reader: _RowReader, tokens: list[int], rate: float, known: list[int]) -> int:
    """`learn_committed` of one row; adds to `known`."""
    context, proposed = reader.tail(), ROOT if reader.network else None
    stores = bool(reader.memory.stores[reader.row])
    for depth, token in enumerate(tokens, 1):
        weights, squares = reader.weights(knows=reader.knows(proposed))
        candidates = reader.candidates(context, proposed, depth)
        proposed = None
        for one, features in candidates:
            error = float(one.token == token) - _chance(weights, features)
            for feature in features if stores else ():
                squares[feature] += error * error
                weights[feature] += rate * error / sqrt(float(squares[feature]))
            if one.token == token:
                proposed = one.node if one.node >= 0 else None
                reader.memory.predicted[reader.row] += one.seen[PREDICTION].order > 0
                if (order := one.seen[PAST].order) >= 0:
                    known[order] += 1
        for part in (TEXT, PAST) if stores else (TEXT,):
            reader.add(context, part, token)
        context = _then(context, token)
    reader.memory.tails[reader.row] = torch.tensor(context)
    return _right(_nodes_of(reader.memory.alone, reader.row), tokens[:-1])


def _count_rejected(reader: _RowReader, tail: tuple[int, ...], nodes: list[_Node], choices: list[int]) -> None:
    """Count in the text what the target chose after each rejected node. # choices [nodes + 1]"""
    accepted = {ROOT}
    for number, node in enumerate(nodes):
        node.context = _then(tail if node.parent == ROOT else nodes[node.parent].context, node.token)
        if node.parent in accepted and choices[node.parent + 1] == node.token:
            accepted.add(number)
        else:
            reader.add(node.context, TEXT, choices[number + 1], _AFTER_REJECTED)


def _right(nodes: list[_Node], tokens: list[int]) -> int:
    """How many of the tokens stand on a path from the root."""
    parent = ROOT
    for depth, token in enumerate(tokens):
        found = [n for n, node in enumerate(nodes) if node.parent == parent and node.token == token]
        if not found:
            return depth
        parent = found[0]
    return len(tokens)


def _hash_factors() -> Tensor:
    """Random odd numbers: one for each order, and one for each token of a context by its age."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(-(2**62), 2**62, (len(ORDERS) + CONTEXT,), generator=generator) | 1


def _then(context: tuple[int, ...], token: int) -> tuple[int, ...]:
    return token, *context[:-1]


def _passed(value: float, edges: Sequence[float]) -> int:
    """Edges below a value."""
    return sum(value > edge for edge in edges)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _nodes_of(tree: DraftTree, line: int) -> list[_Node]:
    count = int(tree.num_nodes[line])
    columns = (values[line, :count].tolist() for values in tree[:4])
    return [_Node(*values) for values in zip(*columns, strict=True)]


def _tree(lines: Sequence[list[_Node]], width: int, device: torch.device) -> DraftTree:
    tree = DraftTree.padding(len(lines), width, device)
    for line, nodes in enumerate(lines):
        _write(tree, line, nodes)
    return tree


def _write(tree: DraftTree, line: int, nodes: list[_Node]) -> None:
    tree.num_nodes[line] = len(nodes)
    for place, node in enumerate(nodes):
        for values, value in zip(tree[:4], (node.token, node.parent, node.depth, node.survival), strict=True):
            values[line, place] = value
