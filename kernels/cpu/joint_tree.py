"""Compiled ops of `kernels.joint_tree`."""

from torch import Tensor

from kernels.cpu.library import Structure, call, contiguous
from kernels.cpu.trees import empty_tree, trees_of
from kernels.memory import ORDERS, Memory
from kernels.trees import DraftTree

_NUM_SUMS = 4 + len(ORDERS)


def add_text(memory: Memory, row: int, part: int, tokens: Tensor) -> None:
    """As the reference. # tokens [count]"""
    call("add_text", _structure_of(memory), row, part, tokens.contiguous(), len(tokens))


def grow_joint_tree(memory: Memory, rows: Tensor, network: DraftTree | None, max_nodes: int, least: float) -> DraftTree:
    """As the reference. # rows [batch]"""
    tree, proposed = empty_tree(len(rows), max_nodes), None if network is None else trees_of(network)
    call("grow_joint_tree", _structure_of(memory), rows.contiguous(), len(rows), proposed, least, trees_of(tree))
    return tree


def learn_committed(
    memory: Memory, rows: Tensor, tokens: Tensor, counts: Tensor, verified: DraftTree, choices: Tensor, rate: float
) -> Tensor:
    """As the reference. # -> [4 + len(ORDERS)]"""
    rows, tokens, counts, choices = contiguous(rows, tokens, counts, choices)
    sums, committed = rows.new_empty(_NUM_SUMS), (tokens, tokens.shape[1], counts)
    call("learn_committed", _structure_of(memory), rows, len(rows), *committed, trees_of(verified), choices, rate, sums)
    return sums


_last: list[tuple[Memory, Structure]] = []
"""The memory that was used last, whose tensors never move: a server has one."""


def _structure_of(memory: Memory) -> Structure:
    """`Memory` of memory.cpp."""
    if not _last or _last[0][0] is not memory:
        *tables, alone, network, factors = memory
        _last[:] = [(memory, Structure(*tables, *trees_of(alone).words, *trees_of(network).words, factors))]
    return _last[0][1]
