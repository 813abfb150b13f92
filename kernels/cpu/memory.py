"""The compiled twins of `kernels.memory`."""

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import address, function
from kernels.cpu.trees import Trees, empty_tree
from kernels.memory import Memory
from kernels.trees import DraftTree


class _Memory(ctypes.Structure):
    """`Memory` of memory.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("entries", "weights", "squares", "parts", "scopes", "tails", "predicted")),
        ("alone", Trees),
        ("network", Trees),
        ("factors", ctypes.c_void_p),
    ]


def add_text(memory: Memory, row: int, part: int, tokens: Tensor) -> None:
    """As the reference."""
    tokens = tokens.contiguous()
    function("add_text", "pnnpn")(_of(memory), row, part, tokens.data_ptr(), len(tokens))


def grow_joint_tree(
    memory: Memory, rows: Tensor, temperatures: Tensor, network: DraftTree | None, max_nodes: int, least: float
) -> DraftTree:
    """As the reference."""
    tree, lines = empty_tree(len(rows), max_nodes), (rows.contiguous(), temperatures.contiguous())
    proposed = None if network is None else ctypes.byref(Trees.of(network))
    given = _of(memory), lines[0].data_ptr(), len(rows), lines[1].data_ptr(), proposed, least
    function("grow_joint_tree", "ppnppfp")(*given, ctypes.byref(Trees.of(tree)))
    return tree


def learn_committed(
    memory: Memory, rows: Tensor, temperatures: Tensor, tokens: Tensor, counts: Tensor, stores: Tensor, rate: float
) -> Tensor:
    """As the reference."""
    rows, tokens, right = rows.contiguous(), tokens.contiguous(), torch.empty_like(rows)
    texts = rows.data_ptr(), len(rows), temperatures.contiguous(), tokens.data_ptr(), tokens.shape[1]
    call, kept = function("learn_committed", "ppnppnppfp"), (counts.contiguous(), stores.contiguous())
    call(_of(memory), *texts[:2], texts[2].data_ptr(), *texts[3:], *map(address, kept), rate, right.data_ptr())
    return right


def _of(memory: Memory) -> object:
    """The record that the kernels read."""
    first = (memory.entries, memory.weights, memory.squares, memory.parts, memory.scopes, memory.tails, memory.predicted)
    trees = Trees.of(memory.alone), Trees.of(memory.network)
    return ctypes.byref(_Memory(*map(address, first), *trees, address(memory.factors)))
