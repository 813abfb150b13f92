"""Compiled ops on draft trees: `kernels.trees`, `lattice`, `survival` and `joint_tree`."""

import torch
from torch import Tensor

from kernels.cpu.library import CStruct, call, contiguous, kept, remembered
from kernels.lattice import CLASS_OF_RANK, NUM_FEATURES, TOP, Lattice, Picked, StartNodes
from kernels.memory import ORDERS, Memory
from kernels.survival import CEILING, CLAIMS, DEPTHS, SIZES, HitCounts, Proposed, Pruned
from kernels.trees import DraftTree, Fates


def trees_of(tree: DraftTree) -> CStruct:
    """Build the C structure `Trees` of trees.h. A function that writes through it needs a contiguous tree."""
    return CStruct(*contiguous(*tree), tree.width)


def empty_tree(batch: int, width: int) -> DraftTree:
    """Allocate trees with uninitialised values, which a kernel fills in. # [batch, width]"""
    tokens, parents, depths = torch.empty(3, batch, width, dtype=torch.int64).unbind()
    return DraftTree(tokens, parents, depths, torch.empty(batch, width), torch.empty(batch, dtype=torch.int64))


def merge_trees(raw: DraftTree, max_nodes: int) -> tuple[DraftTree, Tensor]:
    """Same as the reference op. # -> tree, [batch, nodes] int64"""
    return _cut(raw, max_nodes, merges=True)


def likeliest_nodes(raw: DraftTree, max_nodes: int) -> tuple[DraftTree, Tensor]:
    """Same as the reference op. # -> tree, [batch, nodes] int64"""
    return _cut(raw, max_nodes, merges=False)


def fates(tokens: Tensor, parents: Tensor, depths: Tensor, committed: Tensor, counts: Tensor) -> Fates:
    """Same as the reference op. # -> [batch, nodes]"""
    tried, came_true = (torch.empty(tokens.shape, dtype=torch.bool) for _ in range(2))
    *nodes, committed, counts = contiguous(tokens, parents, depths, committed, counts)
    call("fates", *nodes, *tokens.shape, committed, committed.shape[1], counts, tried, came_true)
    return Fates(tried, came_true)


def ancestor_matrix(parents: Tensor) -> Tensor:
    """Same as the reference op. # [batch, nodes] -> [batch, nodes, nodes]"""
    batch, nodes = parents.shape
    above = torch.empty(batch, nodes, nodes, dtype=torch.bool)
    call("ancestor_matrix", parents.contiguous(), batch, nodes, above)
    return above


def _cut(raw: DraftTree, max_nodes: int, *, merges: bool) -> tuple[DraftTree, Tensor]:
    tree = empty_tree(raw.batch, min(max_nodes, raw.width))
    chosen = torch.empty_like(tree.tokens)
    call("merge_trees", trees_of(raw), raw.batch, merges, trees_of(tree), chosen)
    return tree, chosen


def rank_features(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Same as the reference op; of equal logits the lower id ranks first.
    # [..., vocab] -> [..., NUM_FEATURES], [..., TOP]"""
    scores, (*shape, vocab) = scores.contiguous(), scores.shape
    features, ids = torch.empty(*shape, NUM_FEATURES), torch.empty(*shape, TOP, dtype=torch.int64)
    call("rank_features", scores, ids.numel() // TOP, vocab, features, ids, dtype=scores.dtype)
    return features, ids


_RANKS = len(CLASS_OF_RANK)


def spread_classes(logits: Tensor, logprobs: Tensor) -> Tensor:
    """Same as the reference op. # logits [..., 4], logprobs [..., 10 or more] -> [..., 10]"""
    chances = logprobs.new_empty(*logprobs.shape[:-1], _RANKS)
    rows, width = chances.numel() // _RANKS, logprobs.shape[-1]
    call("spread_classes", *contiguous(logits, logprobs), rows, width, CEILING, chances)
    return chances


def grow_lattice(
    origin: StartNodes, tokens: Tensor, predicted: Tensor, trust: Tensor, first_number: int, least: float, starts: int
) -> tuple[Lattice, Picked]:
    """Same as the reference op. # tokens, predicted [batch, starts, block, rank]; trust [block, rank]"""
    batch, begun, block, ranks = tokens.shape
    tokens, predicted, trust = contiguous(tokens, predicted, trust)
    width = begun * block * ranks
    number = min(starts, width)
    parents, depths = tokens.new_empty(2, batch, width).unbind()
    lattice = Lattice(origin, tokens, parents, depths, predicted.new_empty(batch, width))
    nodes, depth, chosen, start, position = tokens.new_empty(5, batch, number).unbind()
    picked = Picked(StartNodes(nodes, depth, predicted.new_empty(batch, number)), chosen, start, position)
    begins = CStruct(*contiguous(*origin)), batch, begun
    offered = predicted, trust, block, ranks, first_number, CEILING, least
    call("grow_lattice", *begins, *offered, CStruct(*lattice[1:]), CStruct(*picked.origin, *picked[1:]), number)
    return lattice, picked


def keep_proposed(
    log: Proposed, rows: Tensor, tree: DraftTree, chosen: Tensor, predicted: Tensor, buckets: Tensor
) -> None:
    """Same as the reference op. # chosen [batch, nodes of the tree]; predicted [batch, all nodes]"""
    rows, *values = contiguous(rows, chosen, predicted, buckets)
    call("keep_proposed", log_of(log), rows, tree.batch, trees_of(tree), *values, buckets.numel())


def judge_proposed(
    log: Proposed, counts: HitCounts, rows: Tensor, tokens: Tensor, lengths: Tensor, next_block: int
) -> Tensor:
    """Same as the reference op. # tokens [batch, longest] -> [2]"""
    rows, tokens, lengths = contiguous(rows, tokens, lengths)
    (batch, longest), came = tokens.shape, rows.new_empty(2)
    call("judge_proposed", log_of(log), _hits_of(counts), rows, batch, tokens, longest, lengths, next_block, came)
    return came


def count_claims(
    counts: HitCounts,
    bins: Tensor,
    bin_decay: float,
    trees: DraftTree,
    claimed: Tensor,
    buckets: Tensor,
    committed: Tensor,
    num_known: Tensor,
) -> None:
    """Same as the reference op. # bins [3, bins]; claimed, buckets [batch, nodes]; committed [batch, longest]"""
    assert bins.is_contiguous(), "it is changed in place"
    *values, num_known = contiguous(claimed, buckets, committed, num_known)
    counted, verified = (_hits_of(counts), bins, bins.shape[1], bin_decay), (trees_of(trees), trees.batch)
    call("count_claims", *counted, *verified, *values, committed.shape[1], num_known)


def prune_trees(
    candidates: DraftTree,
    deepest: Tensor,
    max_nodes: Tensor,
    rates: Tensor,
    seconds: Tensor,
    weights: Tensor,
    width: int,
    widths: Tensor | None = None,
) -> Pruned:
    """Same as the reference op. # candidates [batch, nodes] -> [batch, width]"""
    batch, choices = candidates.batch, (seconds, seconds.shape[0], weights, widths)
    given, constants = contiguous(deepest, max_nodes, rates), (DEPTHS, CLAIMS, CEILING)
    pruned, written = _pruned_of(batch, min(width, candidates.width))
    call("prune_trees", trees_of(candidates), batch, *given, *constants, *choices, written, *pruned[1:])
    return pruned


@kept
def _pruned_of(batch: int, width: int) -> tuple[Pruned, CStruct]:
    """Make pruned trees, and the C structure that fills in the trees."""
    tree, sizes = empty_tree(batch, width), torch.empty(batch, SIZES, dtype=torch.int64)
    return Pruned(tree, torch.empty_like(tree.survival), torch.empty_like(tree.tokens), sizes), trees_of(tree)


@remembered
def _hits_of(counts: HitCounts) -> CStruct:
    """Build the C structure `Hits` of survival.cpp."""
    tables = counts.came_true, counts.expected, counts.rates
    return CStruct(*tables, counts.rates.shape[0], floats=(counts.prior, counts.decay, counts.low, counts.high))


@remembered
def log_of(log: Proposed) -> CStruct:
    """Build the C structure `Proposed` of survival.cpp."""
    return CStruct(*log, log.tokens.shape[1])


_NUM_SUMS = 4 + len(ORDERS)


def add_text(memory: Memory, row: int, part: int, tokens: Tensor) -> None:
    """Same as the reference op. # tokens [count]"""
    call("add_text", _structure_of(memory), row, part, tokens.contiguous(), tokens.shape[0])


def grow_joint_tree(memory: Memory, rows: Tensor, network: DraftTree | None, max_nodes: int, least: float) -> DraftTree:
    """Same as the reference op. # rows [batch]"""
    proposed = None if network is None else trees_of(network)
    tree, written = _joint_tree_of(rows.shape[0], max_nodes, network is None)
    call("grow_joint_tree", _structure_of(memory), rows.contiguous(), rows.shape[0], proposed, least, written)
    return tree


@kept
def _joint_tree_of(batch: int, width: int, alone: bool) -> tuple[DraftTree, CStruct]:
    """Make trees of the memory alone or of both, and the C structure that fills them in."""
    tree = empty_tree(batch, width)
    return tree, trees_of(tree)


def learn_committed(
    memory: Memory, rows: Tensor, tokens: Tensor, counts: Tensor, verified: DraftTree, choices: Tensor, rate: float
) -> Tensor:
    """Same as the reference op. # -> [4 + len(ORDERS)]"""
    rows, tokens, counts, choices = contiguous(rows, tokens, counts, choices)
    sums, tree = rows.new_empty(_NUM_SUMS), trees_of(verified)
    committed = rows, rows.shape[0], tokens, tokens.shape[1], counts
    call("learn_committed", _structure_of(memory), *committed, tree, choices, rate, sums)
    return sums


@remembered
def _structure_of(memory: Memory) -> CStruct:
    """Build the C structure `Memory` of memory.cpp."""
    *tables, alone, network, factors = memory
    return CStruct(*tables, *trees_of(alone).words, *trees_of(network).words, factors)
