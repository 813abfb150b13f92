"""Layers with a recurrent state: gated delta rule, Mamba-2, and short convolutions, over the rows of a step.

A head's state is a matrix S [key_dim, value_dim]. A row with query q, key k and value v changes it, for the gated delta
rule (Qwen3-Next; Yang et al., 2024) and for Mamba-2 (Dao and Gu, 2024), to

    S' = exp(g) S + k (x) (sigmoid(b) (v - exp(g) k S)),   y = q S',             g = decay softplus(a + time_bias)
    S' = exp(g) S + k (x) (t v),                           y = q S' + skip v,    g = decay t

with t = softplus(a + time_bias), clamped. Queries, keys and values come out of a causal depthwise convolution over the
last `kernel` inputs of a column. All of it is float32 between the inputs and the rounded output.

A step reads a sequence's state once and writes it once. It applies the *replayed* rows, which are the nodes of the last
step's tree that were accepted, then the extend rows, writes the state, and then walks the tree below them: a node
starts from its parent's state, and leaves only its inputs, from which the next step may replay it. Every row, wherever
it stands, is applied by the same function on the same shapes, so that its bits depend on its own text alone.

Legend: rows = rows of the forward; columns = convolved columns, input columns = those and the columns of the gates;
states = indices of a pool of states, of which 0 is all zeros and never written.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class StateRows(NamedTuple):
    """The rows of a forward by sequence, and the states that they begin with. Sequences are all of the forward, in the
    order of their extend rows; see `kernels.rows`."""

    source: Tensor  # [sequences] int64, index of the state to begin with
    target: Tensor  # [sequences] int64, another index, of the state after the extend rows; 0: none is kept
    replayed: Tensor  # [sequences, depth] int64, rows of `drafted` of a step's accepted nodes, in the order of the path
    num_replayed: Tensor  # [sequences] int64
    kept: Tensor  # [sequences] int64, first row of `drafted` for the inputs of each sequence's nodes; none is replayed
    extend_start: Tensor  # [sequences + 1] int64, first extend row of each sequence
    node_start: Tensor  # [sequences + 1] int64, first node row of each sequence
    parents: Tensor  # [sequences, nodes] int64, parents[i] < i, ROOT below the last extend row


class LayerStates(NamedTuple):
    """The states of one layer, by index."""

    tail: Tensor  # [states, kernel - 1, columns] float32, last inputs of the convolution, oldest first
    matrix: Tensor | None  # [states, heads, key_dim, value_dim] float32; None: the layer only convolves
    drafted: Tensor  # [inputs, input columns], of the nodes of steps


class Convolution(NamedTuple):
    """A causal depthwise convolution."""

    weight: Tensor  # [columns, kernel], the newest input's weight last
    bias: Tensor | None  # [columns]
    activated: bool  # silu follows


class Recurrence(NamedTuple):
    """How the matrices of a layer change. Key head h serves the heads from h * heads / key_heads on.

    Input columns of the delta rule: q, k [key_heads * key_dim], v [heads * value_dim], a, b [heads]; of Mamba-2: v, k,
    q, a, which it calls x, B, C and dt. Norms of q and k: l2 by head, and q times key_dim^-0.5; not in Mamba-2."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    decay: Tensor  # [heads] float32, negative: -exp(A_log)
    time_bias: Tensor  # [heads] float32
    corrects: bool  # the delta rule: what the state says of a key already is subtracted from the value
    skip: Tensor | None = None  # [heads] float32
    time_limits: tuple[float, float] = (0.0, float("inf"))


def advance_states(
    inputs: Tensor, convolution: Convolution, recurrence: Recurrence | None, states: LayerStates, rows: StateRows
) -> Tensor:
    """Apply the rows of a forward, and write the targets' states and the inputs of the nodes. A layer without a
    `recurrence` returns what it convolves. # inputs [rows, at least input columns] -> [rows, heads * value_dim or
    columns], like inputs"""
    width = convolution.weight.shape[0] if recurrence is None else recurrence.heads * recurrence.value_dim
    y = inputs.new_zeros(inputs.shape[0], width)
    given = inputs[:, : states.drafted.shape[1]]
    bounds = torch.stack((rows.extend_start, rows.node_start), 1).tolist()  # planned transfer
    indices = torch.stack((rows.source, rows.target, rows.kept), 1).tolist()  # planned transfer
    for number, (source, target, kept) in enumerate(indices):
        (extend, node), (extend_end, node_end) = bounds[number : number + 2]
        state = _State(states.tail[source], None if states.matrix is None else states.matrix[source])
        for past in rows.replayed[number, : rows.num_replayed[number]]:
            state = _applied(states.drafted[past], state, convolution, recurrence)[1]
        for row in range(extend, extend_end):
            y[row], state = _applied(given[row], state, convolution, recurrence)
        walked = [state]  # of the last extend row, then of each node
        for row, parent in zip(range(node, node_end), rows.parents[number], strict=False):
            y[row], after = _applied(given[row], walked[parent + 1], convolution, recurrence)
            walked.append(after)
        if target:
            states.tail[target] = state.tail
            states.drafted[kept : kept + node_end - node] = given[node:node_end]
            if states.matrix is not None and state.matrix is not None:
                states.matrix[target] = state.matrix
    return y


def assert_layout(inputs: Tensor, states: LayerStates, rows: StateRows) -> None:
    """Assert what kernels of `advance_states` need of its arguments. # inputs [rows, at least input columns]"""
    assert inputs.stride(1) == 1, "columns lie side by side"
    assert all(value is None or value.is_contiguous() for value in states), "states are changed in place"


class _State(NamedTuple):
    tail: Tensor  # [kernel - 1, columns]
    matrix: Tensor | None  # [heads, key_dim, value_dim]


def _applied(
    given: Tensor, state: _State, convolution: Convolution, recurrence: Recurrence | None
) -> tuple[Tensor, _State]:
    """Apply one row to a state. # given [input columns] -> [heads * value_dim or columns], and the state after it"""
    columns = convolution.weight.shape[0]
    given = given.float()
    window = torch.cat((state.tail, given[None, :columns]))  # [kernel, columns]
    mixed = (window * convolution.weight.float().mT).sum(0)
    if convolution.bias is not None:
        mixed = mixed + convolution.bias.float()
    if convolution.activated:
        mixed = functional.silu(mixed)
    if recurrence is None:
        return mixed, _State(window[1:], None)
    assert state.matrix is not None, "a recurrence has matrices"
    y, matrix = _advanced(mixed, given[columns:], state.matrix, recurrence)
    return y, _State(window[1:], matrix)


def _advanced(mixed: Tensor, gates: Tensor, matrix: Tensor, recurrence: Recurrence) -> tuple[Tensor, Tensor]:
    """# mixed [columns], gates [gates], matrix [heads, key_dim, value_dim] -> [heads * value_dim], like matrix"""
    heads, keys = recurrence.heads, recurrence.key_heads * recurrence.key_dim
    values = heads * recurrence.value_dim
    query, key, value = (
        mixed.split((keys, keys, values)) if recurrence.corrects else reversed(mixed.split((values, keys, keys)))
    )
    query, key = (_of_heads(part, recurrence) for part in (query, key))  # [heads, key_dim]
    value = value.view(heads, -1)
    time = functional.softplus(gates[:heads] + recurrence.time_bias).clamp(*recurrence.time_limits)
    kept = (recurrence.decay * time).exp()[:, None, None] * matrix
    if recurrence.corrects:
        key, query = _normed(key), _normed(query) * recurrence.key_dim**-0.5
        added = (value - (key[..., None] * kept).sum(1)) * gates[heads : 2 * heads].sigmoid()[:, None]
    else:
        added = value * time[:, None]
    matrix = kept + key[..., None] * added[:, None]
    y = (query[..., None] * matrix).sum(1)
    return (y if recurrence.skip is None else y + recurrence.skip[:, None] * value).flatten(), matrix


def _of_heads(part: Tensor, recurrence: Recurrence) -> Tensor:
    """# [key_heads * key_dim] -> [heads, key_dim]"""
    return part.view(recurrence.key_heads, -1).repeat_interleave(recurrence.heads // recurrence.key_heads, 0)


def _normed(x: Tensor) -> Tensor:
    """# [heads, key_dim]"""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_rms_norm(y: Tensor, gate: Tensor, weight: Tensor, epsilon: float, *, gate_first: bool, groups: int) -> Tensor:
    """z = w * round(x / sqrt(mean(x^2) + epsilon)), means over equal `groups` of a row: with `gate_first` (Mamba-2)
    x = y silu(gate) and z is the result, otherwise (Qwen3-Next) x = y and z silu(gate) is, rounded once more.
    # y, gate [rows, width], weight [width] or [width / groups] of every group -> like y"""
    opened = functional.silu(gate.float()).unflatten(1, (groups, -1))
    x = y.float().unflatten(1, (groups, -1))  # [rows, groups, width / groups]
    x = x * opened if gate_first else x
    normed = torch.rms_norm(x, x.shape[2:], None, epsilon).to(y.dtype)
    weighted = weight.view(-1, x.shape[2]) * normed
    return (weighted if gate_first else weighted * opened).flatten(1).to(y.dtype)
