"""The compiled twins of `kernels.lattice`."""

import ctypes

from torch import Tensor

from kernels.cpu.library import address, function
from kernels.hit_rates import CEILING
from kernels.lattice import CLASS_OF_RANK, Lattice, Origin, Picked


class _Origin(ctypes.Structure):
    """`Origin` of lattice.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in Origin._fields]


class _Picked(ctypes.Structure):
    """`Picked` of lattice.cpp."""

    _fields_ = [("origin", _Origin), *((name, ctypes.c_void_p) for name in ("tokens", "start", "position"))]


class _Nodes(ctypes.Structure):
    """`Nodes` of lattice.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("tokens", "parents", "depths", "survival")]


def spread_classes(logits: Tensor, logprobs: Tensor) -> Tensor:
    """As the reference."""
    logits, logprobs = logits.contiguous(), logprobs.contiguous()
    chances = logprobs.new_empty(*logprobs.shape[:-1], len(CLASS_OF_RANK))
    rows = chances.numel() // len(CLASS_OF_RANK)
    call = function("spread_classes", "ppnnfp")
    call(logits.data_ptr(), logprobs.data_ptr(), rows, logprobs.shape[-1], CEILING, chances.data_ptr())
    return chances


def grow_lattice(
    origin: Origin, tokens: Tensor, predicted: Tensor, trust: Tensor, first_number: int, least: float, starts: int
) -> tuple[Lattice, Picked]:
    """As the reference."""
    batch, begun, block, ranks = tokens.shape
    tokens, predicted, trust = tokens.contiguous(), predicted.contiguous(), trust.contiguous()
    given = [value.contiguous() for value in origin]
    width = begun * block * ranks
    number = min(starts, width)
    parents, depths = tokens.new_empty(2, batch, width).unbind()
    survival, picked_survival = predicted.new_empty(batch, width), predicted.new_empty(batch, number)
    nodes, depth, chosen, start, position = tokens.new_empty(5, batch, number).unbind()
    lattice = Lattice(origin, tokens, parents, depths, survival)
    picked = Picked(Origin(nodes, depth, picked_survival), chosen, start, position)
    made = _Nodes(*map(address, lattice[1:])), _Picked(_Origin(*map(address, picked.origin)), *map(address, picked[1:]))
    call = function("grow_lattice", "pnnppnnnffppn")
    known = ctypes.byref(_Origin(*map(address, given))), batch, begun, predicted.data_ptr(), trust.data_ptr()
    call(*known, block, ranks, first_number, CEILING, least, *map(ctypes.byref, made), number)
    return lattice, picked
