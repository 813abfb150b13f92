"""Compiled ops of `kernels.recurrence`."""

from functools import partial

import torch
from torch import Tensor

from kernels.cpu.library import CStruct, call, contiguous, remembered
from kernels.recurrence import Convolution, LayerStates, Recurrence, StateRows, assert_layout

MOST_KERNEL = 16
"""Inputs of the longest convolution, as in recurrence.cpp."""

_of_layers = partial(remembered, most=256)


def advance_states(
    inputs: Tensor, convolution: Convolution, recurrence: Recurrence | None, states: LayerStates, rows: StateRows
) -> Tensor:
    """Same as the reference op. # inputs [rows, at least input columns] -> [rows, heads * value_dim or columns]"""
    assert_layout(inputs, states, rows)
    width, prepared = convolution.weight.shape[0], None
    if recurrence is not None:
        number = inputs.shape[0] + rows.replayed.numel()
        prepared = inputs.new_empty(number, width + 2 * recurrence.heads, dtype=torch.float32)
        width = recurrence.heads * recurrence.value_dim
    y = inputs.new_zeros(inputs.shape[0], width)
    form = convolution_structure(convolution), recurrence and recurrence_structure(recurrence)
    of_layer = CStruct(*states, states.drafted.shape[1])
    of_rows = CStruct(*contiguous(*rows), rows.source.shape[0], rows.replayed.shape[1], rows.parents.shape[1])
    call("advance_states", *form, of_layer, of_rows, inputs, inputs.stride(0), y, prepared, dtype=inputs.dtype)
    return y


@_of_layers
def convolution_structure(form: Convolution) -> CStruct:
    """Build the C structure `Convolution` of recurrence.cpp. Raises NotImplementedError if it is too long."""
    columns, kernel = form.weight.shape
    if kernel > MOST_KERNEL:
        raise NotImplementedError(f"a convolution over {kernel} inputs, at most {MOST_KERNEL}")
    bias = None if form.bias is None else form.bias.detach().float().contiguous()
    return CStruct(form.weight.detach().float().mT.contiguous(), bias, kernel, columns, form.activated)


@_of_layers
def recurrence_structure(form: Recurrence) -> CStruct:
    """Build the C structure `Recurrence` of recurrence.cpp."""
    tensors = (value if value is None else value.detach().float() for value in (form.decay, form.time_bias, form.skip))
    return CStruct(*tensors, *form[:4], form.corrects, floats=form.time_limits)


def gated_rms_norm(y: Tensor, gate: Tensor, weight: Tensor, epsilon: float, *, gate_first: bool, groups: int) -> Tensor:
    """Same as the reference op. # y, gate [rows, width], weight [width] or [width / groups] -> like y"""
    assert gate.stride(1) == 1, "columns lie side by side"
    y, weight = contiguous(y, weight)
    (rows, width), shared, z = y.shape, len(weight) < y.shape[1], torch.empty_like(y)
    sizes = rows, groups, width // groups
    call("gated_rms_norm", y, gate, gate.stride(0), weight, shared, epsilon, gate_first, z, *sizes, dtype=y.dtype)
    return z
