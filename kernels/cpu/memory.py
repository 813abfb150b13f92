"""The compiled twins of `kernels.memory`."""

import ctypes

from torch import Tensor

from kernels.cpu.library import address, function
from kernels.cpu.trees import Trees, empty_tree
from kernels.memory import ORDERS, Memory
from kernels.trees import DraftTree

_BEFORE_TREES = Memory._fields[: Memory._fields.index("alone")]
_SUMS = 4 + len(ORDERS)


class _Memory(ctypes.Structure):
    """`Memory` of memory.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _BEFORE_TREES),
        ("alone", Trees),
        ("network", Trees),
        ("factors", ctypes.c_void_p),
    ]


def add_text(memory: Memory, row: int, part: int, tokens: Tensor) -> None:
    """As the reference."""
    tokens = tokens.contiguous()
    function("add_text", "pnnpn")(_of(memory), row, part, tokens.data_ptr(), len(tokens))


def grow_joint_tree(memory: Memory, rows: Tensor, network: DraftTree | None, max_nodes: int, least: float) -> DraftTree:
    """As the reference."""
    tree, rows = empty_tree(len(rows), max_nodes), rows.contiguous()
    proposed = None if network is None else ctypes.byref(Trees.of(network))
    given = _of(memory), rows.data_ptr(), len(rows), proposed, least
    function("grow_joint_tree", "ppnpfp")(*given, ctypes.byref(Trees.of(tree)))
    return tree


def learn_committed(
    memory: Memory, rows: Tensor, tokens: Tensor, counts: Tensor, verified: DraftTree, choices: Tensor, rate: float
) -> Tensor:
    """As the reference."""
    rows, tokens, counts, choices = (values.contiguous() for values in (rows, tokens, counts, choices))
    tree, sums = Trees.of(DraftTree(*(values.contiguous() for values in verified))), rows.new_empty(_SUMS)
    given = rows.data_ptr(), len(rows), tokens.data_ptr(), tokens.shape[1], counts.data_ptr()
    asked = ctypes.byref(tree), choices.data_ptr(), rate, sums.data_ptr()
    function("learn_committed", "ppnpnpppfp")(_of(memory), *given, *asked)
    return sums


def _of(memory: Memory) -> object:
    """The record that the kernels read."""
    before = (address(getattr(memory, name)) for name in _BEFORE_TREES)
    trees = Trees.of(memory.alone), Trees.of(memory.network)
    return ctypes.byref(_Memory(*before, *trees, address(memory.factors)))
