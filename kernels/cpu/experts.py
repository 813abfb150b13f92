"""Compiled ops of `kernels.experts`: rows are sorted by expert, and one native call reads each chosen expert's weights
once."""

from ctypes import c_void_p, cast

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.layers import ACTIVATIONS, OUTPUTS, PackedWeight, as_tensor, cut_words
from kernels.cpu.library import CStruct, call, contiguous, function, weight_memory
from kernels.experts import QuantisedStack, Router, StackedWeight
from kernels.layers import GateForm
from kernels.pieces import Pieces, pieces_of

_SCORES = ("softmax", "sigmoid", "softmax_of_chosen")  # in the order of experts.cpp


def choose_experts(
    logits: Tensor, router: Router, correction: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Same as the reference op. # logits [rows, experts]; correction, expert_scale [experts] float32
    # -> indices and weights [rows, chosen]"""
    (rows, experts), sizes = logits.shape, (logits.shape[0], router.chosen)
    indices, weights = (logits.new_empty(sizes, dtype=kind) for kind in (torch.int64, torch.float32))
    structure = router_structure(router, experts, correction, expert_scale)
    call("choose_experts", structure, logits.contiguous(), indices, weights, rows, dtype=logits.dtype)
    return indices, weights


def router_structure(
    router: Router, experts: int, correction: Tensor | None = None, expert_scale: Tensor | None = None
) -> CStruct:
    """Build the C structure `Router` of decoder.h. # correction, expert_scale [experts] float32, contiguous"""
    numbers = experts, router.chosen, _SCORES.index(router.scores), router.normalised
    groups = router.groups, router.chosen_groups
    return CStruct(*numbers, *groups, correction, expert_scale, floats=(router.scale,))


class PackedExperts:
    """The feed-forward of packed experts."""

    def __init__(
        self,
        gate_up: StackedWeight,
        down: StackedWeight,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        gate: GateForm,
        pieces: Pieces | None = None,
    ) -> None:
        """Pack the weights. Raises ValueError for an odd number of input columns. # shapes as in the reference op"""
        (first, first_kept), (second, second_kept) = _packed(gate_up, gate_up_bias), _packed(down, down_bias)
        cut, number = pieces or pieces_of(gate_up.shape[0], 1), gate_up.shape[0]
        words = *first.words, *second.words, number, *cut_words(cut.ends, whole=cut.whole)
        self.structure = CStruct(*words, ACTIVATIONS.index(gate.activation), floats=(gate.limit,))
        """The C structure `Experts` of decoder.h."""
        self._of_parts = None if cut.whole else torch.float32
        self._kept, self.out = (first_kept, second_kept), down.shape[1]
        self.scratch = max(gate_up.shape[2], self.out) + 3 * down.shape[2]
        """Elements of intermediate results for each row and chosen expert."""

    def __call__(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Run the chosen experts. # x [rows, in]; indices [rows, chosen] int64, weights float32 -> [rows, out]"""
        rows, chosen = indices.shape
        y, scratch = x.new_empty(rows, self.out, dtype=self._of_parts), x.new_empty(rows * chosen * self.scratch)
        given = contiguous(x, indices, weights)
        call("experts", self.structure, *given, y, rows, chosen, scratch, dtype=x.dtype)
        return y


plan_experts = PackedExperts


def _packed(stack: StackedWeight, bias: Tensor | None) -> tuple[CStruct, object]:
    """Build the C structure `Stack` of decoder.h. Returns it with the objects that it points to.
    # stack [experts, out, in], bias [experts, out]"""
    experts, out, columns = stack.shape
    if columns % 2:
        raise ValueError(f"experts with {columns} input columns: the kernels read columns in pairs")
    padding = -out % OUTPUTS
    if isinstance(stack, QuantisedStack):
        kernel, (packed, kept) = "grouped_quantised", _matrices(stack)
    else:
        kernel, kept = "grouped_linear", None
        packed = weight_memory(experts * (out + padding) * columns * stack.itemsize).view(experts, -1)
        for weight, place in zip(stack.detach(), packed, strict=True):
            call("pack", weight.contiguous(), place, columns, out, dtype=stack.dtype)
    biases = None if bias is None else functional.pad(bias.detach().float(), (0, padding))
    address = cast(function(kernel, stack.dtype), c_void_p).value
    return CStruct(address, packed, packed.stride(0), biases, out + padding, columns, out), (packed, kept, biases)


def _matrices(stack: QuantisedStack) -> tuple[Tensor, object]:
    """Build the C structures `Matrix` of linear_quantised.cpp, one for each expert. Returns them with the objects that
    they point to. # -> [experts, bytes] uint8"""
    parts = [weight.parts for weight in stack.weights if isinstance(weight, PackedWeight)]
    assert len(parts) == len(stack.weights), "weights are packed by other ops"
    assert len({tuple(part.outputs for part in of_one) for of_one in parts}) == 1, "experts have parts of one size"
    joined = as_tensor(b"".join(part.structure for of_one in parts for part in of_one)).view(len(parts), -1)
    matrices = as_tensor(b"".join(CStruct(line.data_ptr(), len(parts[0])) for line in joined))
    return matrices.view(len(parts), -1), (joined, parts)
