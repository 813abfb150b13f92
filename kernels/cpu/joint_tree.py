"""Compiled ops of `kernels.joint_tree`."""

from torch import Tensor

from kernels.cpu.library import CStruct, call, contiguous, remembered
from kernels.cpu.trees import empty_tree, trees_of
from kernels.memory import ORDERS, Memory
from kernels.trees import DraftTree

_NUM_SUMS = 4 + len(ORDERS)


def add_text(memory: Memory, row: int, part: int, tokens: Tensor) -> None:
    """As the reference. # tokens [count]"""
    call("add_text", _structure_of(memory), row, part, tokens.contiguous(), tokens.shape[0])


def grow_joint_tree(memory: Memory, rows: Tensor, network: DraftTree | None, max_nodes: int, least: float) -> DraftTree:
    """As the reference. # rows [batch]"""
    tree, proposed = empty_tree(rows.shape[0], max_nodes), None if network is None else trees_of(network)
    call("grow_joint_tree", _structure_of(memory), rows.contiguous(), rows.shape[0], proposed, least, trees_of(tree))
    return tree


def learn_committed(
    memory: Memory, rows: Tensor, tokens: Tensor, counts: Tensor, verified: DraftTree, choices: Tensor, rate: float
) -> Tensor:
    """As the reference. # -> [4 + len(ORDERS)]"""
    rows, tokens, counts, choices = contiguous(rows, tokens, counts, choices)
    sums, tree = rows.new_empty(_NUM_SUMS), trees_of(verified)
    committed = rows, rows.shape[0], tokens, tokens.shape[1], counts
    call("learn_committed", _structure_of(memory), *committed, tree, choices, rate, sums)
    return sums


@remembered
def _structure_of(memory: Memory) -> CStruct:
    """`Memory` of memory.cpp."""
    *tables, alone, network, factors = memory
    return CStruct(*tables, *trees_of(alone).words, *trees_of(network).words, factors)
