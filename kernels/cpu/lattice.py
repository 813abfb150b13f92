"""Compiled ops of `kernels.lattice`."""

from torch import Tensor

from kernels.cpu.library import CStruct, call, contiguous
from kernels.lattice import CLASS_OF_RANK, Lattice, Picked, StartNodes
from kernels.survival import CEILING

_RANKS = len(CLASS_OF_RANK)


def spread_classes(logits: Tensor, logprobs: Tensor) -> Tensor:
    """As the reference. # logits [..., 4], logprobs [..., 10 or more] -> [..., 10]"""
    chances = logprobs.new_empty(*logprobs.shape[:-1], _RANKS)
    rows, width = chances.numel() // _RANKS, logprobs.shape[-1]
    call("spread_classes", *contiguous(logits, logprobs), rows, width, CEILING, chances)
    return chances


def grow_lattice(
    origin: StartNodes, tokens: Tensor, predicted: Tensor, trust: Tensor, first_number: int, least: float, starts: int
) -> tuple[Lattice, Picked]:
    """As the reference. # tokens, predicted [batch, starts, block, rank]; trust [block, rank]"""
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
