# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""Ops of `kernels.recurrence`; `advance_states` is one launch.

A program holds a tile of value columns of one head's matrix in registers, convolves the columns that it needs, and runs
through the rows of its sequence: first the replayed and the extend rows, then for each node the rows of its path, from
the state after the extend rows. All of these rows pass the same instructions, of which a compiler has one copy, so that
they have the same bits. Programs share no sum."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra import libdevice

from kernels.recurrence import Convolution, LayerStates, Recurrence, StateRows, assert_layout
from kernels.tree_attention import MAX_DEPTH
from kernels.triton.layers import add_rms_norm

MOST_KERNEL = 4
"""Inputs of the longest convolution."""

_MOST, _SHARE = tl.constexpr(MAX_DEPTH), tl.constexpr(128)
_TILE, _COLUMNS = 16, 128  # value columns of a program, with a matrix and without one


class _Form(NamedTuple):
    """What a kernel is compiled for. A layer that only convolves has one head of values, and no keys."""

    tile: int  # value columns of a program
    stride: int  # of rows of inputs
    input_columns: int
    columns: int
    kernel: int
    activated: bool
    has_bias: bool
    value_dim: int
    heads: int = 1
    shared: int = 1  # heads of a key head
    key_dim: int = 0
    keys: int = 1  # power of two that holds key_dim
    limits: tuple[float, float] = (0.0, 0.0)
    corrects: bool = False
    has_skip: bool = False


def advance_states(
    inputs: Tensor, convolution: Convolution, recurrence: Recurrence | None, states: LayerStates, rows: StateRows
) -> Tensor:
    """Same as the reference op. Raises NotImplementedError for a convolution over more than four inputs.
    # inputs [rows, at least input columns] -> [rows, heads * value_dim or columns]"""
    assert_layout(inputs, states, rows)
    (weight, bias, activated), (columns, kernel), of = convolution, convolution.weight.shape, recurrence
    if kernel > MOST_KERNEL:
        raise NotImplementedError(f"a convolution over {kernel} inputs, at most {MOST_KERNEL}")
    tile, layer = _COLUMNS if of is None else _TILE, [weight, bias]
    sizes: list[Any] = [tile, inputs.stride(0), states.drafted.shape[1], columns, kernel, activated, bias is not None]
    sizes += [columns] if of is None else [of.value_dim, of.heads, of.heads // of.key_heads, of.key_dim]
    if of is not None:
        sizes += triton.next_power_of_2(of.key_dim), of.time_limits, of.corrects, of.skip is not None
        layer += of.decay, of.time_bias, of.skip
    form = _Form(*sizes)
    y = inputs.new_zeros(inputs.shape[0], form.heads * form.value_dim)
    tensors = [weight if value is None else value.contiguous() for value in (*layer, *states, *rows)]
    if rows.source.shape[0]:
        _walk_states[(rows.source.shape[0], form.heads, triton.cdiv(form.value_dim, tile))](
            inputs, y, tuple(tensors[: len(layer)]), LayerStates(*tensors[len(layer) : -8]), StateRows(*tensors[-8:]),
            rows.replayed.shape[1], rows.parents.shape[1], FORM=form, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["depth", "nodes"])
def _walk_states(
    inputs: tl.tensor,
    y: tl.tensor,
    layer: tl.tuple,
    states: tl.tuple,
    rows: tl.tuple,
    depth: tl.tensor,
    nodes: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    """Run one tile of a head through the rows of one sequence. A pair is the head's key and query."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, side = tl.arange(0, FORM.keys)[:, None], tl.arange(0, 2)[None, :]
    column, slot = tl.program_id(2) * FORM.tile + tl.arange(0, FORM.tile), tl.arange(0, _MOST)
    is_key, is_value = key < FORM.key_dim, column < FORM.value_dim
    keys: tl.constexpr = FORM.heads // FORM.shared * FORM.key_dim
    value_at = head * FORM.value_dim + column + (2 * keys if FORM.corrects else 0)
    pair_at = head // FORM.shared * FORM.key_dim + key + side * (-keys if FORM.corrects else keys)
    pair_at += keys if FORM.corrects else FORM.heads * FORM.value_dim
    begin, target = tl.load(rows.source + sequence), tl.load(rows.target + sequence)
    own = states.drafted + tl.load(rows.kept + sequence) * FORM.input_columns
    first, node = tl.load(rows.extend_start + sequence), tl.load(rows.node_start + sequence)
    num_past = tl.load(rows.num_replayed + sequence)
    num_certain = num_past + tl.load(rows.extend_start + sequence + 1) - first
    base_v, weights_v = _begun(states.tail, begin, layer, value_at, is_value, FORM)
    base_p, weights_p = _begun(states.tail, begin, layer, pair_at, is_key, FORM)
    place = (head * FORM.key_dim + key) * FORM.value_dim + column[None, :]
    is_state, state_size = is_key & is_value[None, :], FORM.heads * FORM.key_dim * FORM.value_dim
    base = tl.load(states.matrix + begin * state_size + place, mask=is_state, other=0.0).to(tl.float32)

    for run in range(tl.load(rows.node_start + sequence + 1) - node + 1):  # certain rows, then the path to each node
        of_node, (path, length) = run > 0 * node, _path_to(rows.parents + sequence * nodes, run - 1 + 0 * node, slot)
        length = tl.where(of_node, length, num_certain)
        state, v, p = base, base_v, base_p
        for i in range(length):
            left = length - 1 - i
            is_past, shown = ~of_node & (i < num_past), tl.where(of_node, left == 0, i >= num_past)
            row = tl.where(of_node, node + tl.sum(tl.where(slot == left, path, 0), 0), first + i - num_past)
            number = tl.load(rows.replayed + sequence * depth + i, mask=is_past, other=0)
            given = tl.where(is_past, states.drafted + number * FORM.input_columns, inputs + row * FORM.stride)
            if of_node & (left == 0) & (target > 0):
                _copy(given, own + (run - 1) * FORM.input_columns, FORM)
            value, v = _convolved(tl.load(given + value_at, mask=is_value, other=0.0), v, weights_v, FORM)
            result = value
            if FORM.key_dim > 0:
                pair, p = _convolved(tl.load(given + pair_at, mask=is_key, other=0.0), p, weights_p, FORM)
                state, result = _applied(state, pair, value, given + FORM.columns + head, layer, FORM)
            at = y + (row * FORM.heads + head) * FORM.value_dim + column
            tl.store(at, result, mask=column < tl.where(shown, FORM.value_dim, 0))
        if run == 0:
            base, base_v, base_p = state, v, p
            if target > 0:
                _keep(states.tail, target, v, value_at, is_value, FORM)
                if FORM.key_dim > 0:
                    is_own = (tl.program_id(2) == 0) & (head % FORM.shared == 0)  # one program writes a key head's
                    _keep(states.tail, target, p, pair_at, key < tl.where(is_own, FORM.key_dim, 0), FORM)
                    tl.store(states.matrix + target * state_size + place, state, mask=is_state)


@triton.jit
def _path_to(parents: tl.tensor, here: tl.tensor, slot: tl.tensor) -> tl.tuple:
    """Return the nodes from a node up, and their number. # slot [MAX_DEPTH] -> like slot"""
    path, length = slot.to(tl.int64) * 0, here * 0
    while here >= 0:
        path = tl.where(slot == length, here, path)
        length += 1
        here = tl.load(parents + here)
    return path, length


@triton.jit
def _copy(given: tl.tensor, to: tl.tensor, FORM: tl.constexpr) -> None:
    """Copy the inputs of a row: each program of the sequence has its share."""
    number, count = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2), tl.num_programs(1) * tl.num_programs(2)
    for start in range(number * _SHARE, FORM.input_columns, count * _SHARE):
        at = start + tl.arange(0, _SHARE)
        tl.store(to + at, tl.load(given + at, mask=at < FORM.input_columns), mask=at < FORM.input_columns)


@triton.jit
def _applied(
    state: tl.tensor, pair: tl.tensor, value: tl.tensor, gates: tl.tensor, layer: tl.tuple, FORM: tl.constexpr
) -> tl.tuple:
    """Apply one row. # state [keys, tile], pair [keys, 2], value [tile] -> state, result [tile]"""
    head = tl.program_id(1)
    x = tl.load(gates).to(tl.float32) + tl.load(layer[3] + head)
    time = tl.maximum(x, 0.0) + libdevice.log1p(tl.exp(-tl.abs(x)))
    time = tl.minimum(tl.maximum(time, FORM.limits[0]), FORM.limits[1])
    factor = tl.exp(tl.load(layer[2] + head) * time)
    if FORM.corrects:
        line, query = tl.split(pair * tl.rsqrt(tl.sum(pair * pair, 0) + 1e-6)[None, :])
        query *= FORM.key_dim**-0.5
        known = factor * tl.sum(line[:, None] * state, 0)
        added = (value - known) / (1.0 + tl.exp(-tl.load(gates + FORM.heads).to(tl.float32)))
    else:
        line, query = tl.split(pair)
        added = value * time
    state = factor * state + line[:, None] * added[None, :]
    result = tl.sum(query[:, None] * state, 0)
    if FORM.has_skip:
        result += tl.load(layer[4] + head) * value
    return state, result


@triton.jit
def _begun(
    tail: tl.tensor, state: tl.tensor, layer: tl.tuple, at: tl.tensor, held: tl.tensor, FORM: tl.constexpr
) -> tl.tuple:
    """Load the last inputs of some columns, and the weights of all, newest first, and the bias; zeros where the
    convolution is shorter."""
    past = tail + (state * (FORM.kernel - 1) + FORM.kernel - 2) * FORM.columns + at
    first = tl.load(past, mask=held & (FORM.kernel > 1), other=0.0)
    second = tl.load(past - FORM.columns, mask=held & (FORM.kernel > 2), other=0.0)
    third = tl.load(past - 2 * FORM.columns, mask=held & (FORM.kernel > 3), other=0.0)
    newest = layer[0] + at * FORM.kernel + FORM.kernel - 1
    constant = tl.load(layer[1] + at, mask=held & FORM.has_bias, other=0.0).to(tl.float32)
    weight_0 = tl.load(newest, mask=held, other=0.0).to(tl.float32)
    weight_1 = tl.load(newest - 1, mask=held & (FORM.kernel > 1), other=0.0).to(tl.float32)
    weight_2 = tl.load(newest - 2, mask=held & (FORM.kernel > 2), other=0.0).to(tl.float32)
    weight_3 = tl.load(newest - 3, mask=held & (FORM.kernel > 3), other=0.0).to(tl.float32)
    return (first, second, third), (weight_0, weight_1, weight_2, weight_3, constant)


@triton.jit
def _keep(
    tail: tl.tensor, state: tl.tensor, past: tl.tuple, at: tl.tensor, held: tl.tensor, FORM: tl.constexpr
) -> None:
    """Store the last inputs of some columns."""
    to = tail + (state * (FORM.kernel - 1) + FORM.kernel - 2) * FORM.columns + at
    tl.store(to, past[0], mask=held & (FORM.kernel > 1))
    tl.store(to - FORM.columns, past[1], mask=held & (FORM.kernel > 2))
    tl.store(to - 2 * FORM.columns, past[2], mask=held & (FORM.kernel > 3))


@triton.jit
def _convolved(new: tl.tensor, past: tl.tuple, weights: tl.tuple, FORM: tl.constexpr) -> tl.tuple:
    """Convolve some columns. Returns the result and the last inputs."""
    new = new.to(tl.float32)
    x = weights[4] + weights[3] * past[2] + weights[2] * past[1] + weights[1] * past[0] + weights[0] * new
    if FORM.activated:
        x = x / (1.0 + tl.exp(-x))
    return x, (new, past[0], past[1])


def gated_rms_norm(y: Tensor, gate: Tensor, weight: Tensor, epsilon: float, *, gate_first: bool, groups: int) -> Tensor:
    """Same as the reference op; each group is a row of the kernel of norms. # y, gate [rows, width], weight [width] or
    [width / groups] -> like y"""
    opening, size = functional.silu(gate.float()), y.shape[1] // groups
    x = (y.float() * opening if gate_first else y.float()).view(-1, size)  # [rows * groups, size]
    normed = add_rms_norm(x, None, x.new_ones(size), epsilon).to(y.dtype)
    weighted = (weight.view(-1, size) * normed.view(-1, groups, size)).flatten(1)
    return weighted if gate_first else (weighted * opening).to(y.dtype)
