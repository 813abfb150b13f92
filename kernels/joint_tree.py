"""Ops of an n-gram memory (`kernels/memory.py`): count tokens of a text, grow a draft tree from the memory's counts and
a network's proposals together, and learn from its outcome. These are the references, in plain Python."""

from collections.abc import Iterator, Sequence
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from kernels.memory import (
    AFTER_REJECTED,
    CHANCE_LIMITS,
    MAX_DEPTH,
    NO_TOKEN,
    ORDERS,
    PAST,
    PREDICTION,
    TEXT,
    GrownNode,
    Memory,
    RowReader,
    nodes_of,
    then,
    write_nodes,
)
from kernels.trees import ROOT, DraftTree


def add_text(memory: Memory, row: int, part: int, tokens: Tensor) -> None:
    """Count tokens in one of the row's parts, each after its context; the first one follows the row's tail. If the part
    is TEXT, the tail is moved to the end of `tokens`. # tokens [count] int64"""
    reader = RowReader(memory, row)
    context = reader.tail()
    for token in tokens.tolist():
        reader.add(context, part, token)
        context = then(context, token)
    if part == TEXT:
        memory.tails[row] = torch.tensor(context)


def grow_joint_tree(memory: Memory, rows: Tensor, network: DraftTree | None, max_nodes: int, least: float) -> DraftTree:
    """Grow each row's tree: the `max_nodes` nodes of highest survival, best first, among all that the row's parts and
    the network propose with a survival of at least `least`. Stores the network's proposals or, without a network, the
    grown tree in the memory, for `learn_committed`. # rows [batch] int64, network [batch, nodes] -> [batch, max_nodes]
    """
    lines = []
    for line, row in enumerate(rows.tolist()):
        kept = memory.network if network is not None else memory.alone
        memory.network.num_nodes[row] = 0
        if network is not None:
            write_nodes(kept, row, nodes_of(network, line))
        nodes = _grow(RowReader(memory, row), max_nodes, least)
        if network is None:
            write_nodes(kept, row, nodes)
        lines.append(nodes)
    return _tree(lines, max_nodes, rows.device)


def learn_committed(
    memory: Memory, rows: Tensor, tokens: Tensor, counts: Tensor, verified: DraftTree, choices: Tensor, rate: float
) -> Tensor:
    """Learn from committed tokens: count them in each row's text and, if the row stores answers, in its scope's past
    answers; train the scope's weights on the candidates at each position; count the target's choices after rejected
    nodes in the text. Returns these sums over the batch: accepted tokens (all but the last of each row) that the trees
    grown without a network contained; accepted tokens; committed tokens; tokens counted in past answers; and for each
    order, tokens that past answers had counted before, with that order as the longest context.
    # rows, counts [batch] int64; tokens [batch, depth + 1] int64; choices [batch, nodes + 1] int64, after the root and
    after each verified node -> [4 + len(ORDERS)] int64"""
    given = list(zip(*(values.tolist() for values in (rows, tokens, counts)), strict=True))
    right, known = 0, [0] * len(ORDERS)
    for line, (row, text, count) in enumerate(given):
        reader = RowReader(memory, row)
        before = reader.tail()
        right += _learn_row(reader, text[:count], rate, known)
        _count_rejected(reader, before, nodes_of(verified, line), choices[line].tolist())
        memory.alone.num_nodes[row] = memory.network.num_nodes[row] = 0  # a step may commit without having grown
    accepted = sum(max(0, count - 1) for *_, count in given)
    remembered = sum(count for row, _, count in given if memory.stores[row] and memory.parts[row, PAST, 1])
    committed = sum(count for *_, count in given)
    return torch.tensor([right, accepted, committed, remembered, *known], device=rows.device)


def _grow(reader: RowReader, most: int, least: float) -> list[GrownNode]:
    """Grow a tree best first: expand the likeliest node that is not expanded yet, and keep the `most` likeliest nodes.
    A better node replaces the least likely one, which has no child in the tree: a child is less likely than its
    parent."""
    nodes: list[GrownNode] = []
    expanded = set[int]()
    number, parent = ROOT, GrownNode(NO_TOKEN, ROOT, 0, 1.0, reader.tail(), ROOT)
    while True:
        if parent.depth < MAX_DEPTH:
            for node in _children(reader, parent, number):
                if node.survival >= least:
                    _insert(nodes, expanded, node, most)
        waiting = [place for place in range(len(nodes)) if place not in expanded]
        if not waiting:
            break
        number = max(waiting, key=lambda place: nodes[place].survival)
        expanded.add(number)
        parent = nodes[number]
    order = sorted(range(len(nodes)), key=lambda place: -nodes[place].survival)
    numbers = {ROOT: ROOT, **{place: new for new, place in enumerate(order)}}
    return [GrownNode(n.token, numbers[n.parent], n.depth, n.survival) for n in (nodes[place] for place in order)]


def _children(reader: RowReader, parent: GrownNode, number: int) -> Iterator[GrownNode]:
    weights, _ = reader.weights(knows=reader.knows(parent.proposed))
    for one, features in reader.candidates(parent.context, parent.proposed, parent.depth + 1):
        survival = float(np.float32(parent.survival) * np.float32(_chance(weights, features)))
        proposed = one.node if one.node >= 0 else None
        yield GrownNode(one.token, number, parent.depth + 1, survival, then(parent.context, one.token), proposed)


def _insert(nodes: list[GrownNode], expanded: set[int], node: GrownNode, most: int) -> None:
    if len(nodes) < most:
        nodes.append(node)
        return
    place = min(range(most), key=lambda place: nodes[place].survival)
    if node.survival > nodes[place].survival:
        nodes[place] = node
        expanded.discard(place)


def _learn_row(reader: RowReader, tokens: list[int], rate: float, known: list[int]) -> int:
    """Learn one row's committed tokens, as in `learn_committed`; adds to `known`, and returns how many of the accepted
    tokens the tree without a network contained."""
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
        context = then(context, token)
    reader.memory.tails[reader.row] = torch.tensor(context)
    return _num_matching(nodes_of(reader.memory.alone, reader.row), tokens[:-1])


def _count_rejected(reader: RowReader, tail: tuple[int, ...], nodes: list[GrownNode], choices: list[int]) -> None:
    """Count the target's choice after each rejected node in the text. # choices [nodes + 1]"""
    accepted = {ROOT}
    for number, node in enumerate(nodes):
        node.context = then(tail if node.parent == ROOT else nodes[node.parent].context, node.token)
        if node.parent in accepted and choices[node.parent + 1] == node.token:
            accepted.add(number)
        else:
            reader.add(node.context, TEXT, choices[number + 1], AFTER_REJECTED)


def _num_matching(nodes: list[GrownNode], tokens: list[int]) -> int:
    """Count the leading tokens that form a path of nodes from the root."""
    parent = ROOT
    for depth, token in enumerate(tokens):
        found = [n for n, node in enumerate(nodes) if node.parent == parent and node.token == token]
        if not found:
            return depth
        parent = found[0]
    return len(tokens)


def _tree(lines: Sequence[list[GrownNode]], width: int, device: torch.device) -> DraftTree:
    tree = DraftTree.padding(len(lines), width, device)
    for line, nodes in enumerate(lines):
        write_nodes(tree, line, nodes)
    return tree


def _chance(weights: Tensor, features: list[int]) -> float:
    low, high = CHANCE_LIMITS
    score = sum(weights[features].numpy(), np.float32(0))  # summed in the order of groups, as kernels do
    return float(np.clip(1 / (1 + np.exp(-score)), np.float32(low), np.float32(high)))
