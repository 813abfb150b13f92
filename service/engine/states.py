"""States of recurrent layers: what a sequence has read so far, in a form whose size does not grow with its length.

Memory holds states by index. Index 0 is the null state, all zeros, where texts begin. Each row of the slot table has
two working states: a step reads one and writes the other, and the host changes from one to the other only when the step
has succeeded, so that a step that is repeated reads what it has read before. Further indices are snapshots, which the
prefix cache keeps at the ends of prefixes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.library import pool_memory
from kernels.graph_runner import send
from kernels.recurrence import LayerStates, StateRows
from kernels.rows import ExtendRows
from kernels.tree_attention import MAX_DEPTH

NULL_STATE = 0

_FLOAT_BYTES = torch.float32.itemsize  # states are float32, whatever the type of activations


@dataclass(frozen=True, slots=True)
class StateShape:
    """State of one sequence in one recurrent layer: the last inputs of its convolution, and a matrix per head."""

    kernel: int  # number of inputs that the convolution sees, its own included
    columns: int  # columns of the convolution
    heads: int  # 0: the layer has only a convolution
    key_dim: int
    value_dim: int
    input_columns: int  # columns of a tree node's input, from which it is replayed

    @property
    def num_bytes(self) -> int:
        """Bytes of one state."""
        return _FLOAT_BYTES * ((self.kernel - 1) * self.columns + self.heads * self.key_dim * self.value_dim)


class StateRoom(NamedTuple):
    """Numbers of what memory holds states for."""

    sequences: int = 1  # rows of the slot table
    nodes: int = 0  # most nodes of a sequence's tree
    snapshots: int = 0  # states of cached prefixes

    @property
    def num_working(self) -> int:
        """Number of working states."""
        return 2 * self.sequences

    @property
    def described(self) -> str:
        """Describe the numbers for the log."""
        return f"states of {self.sequences} sequences and {self.snapshots} prefixes"

    def layer(self, shape: StateShape, dtype: torch.dtype, device: torch.device) -> LayerStates:
        """Allocate the states of a layer, all zeros. `dtype`: type of activations."""
        states, columns = 1 + self.num_working + self.snapshots, shape.input_columns
        matrices = states, shape.heads, shape.key_dim, shape.value_dim
        return LayerStates(
            tail=pool_memory((states, shape.kernel - 1, shape.columns), torch.float32, device),
            matrix=pool_memory(matrices, torch.float32, device) if shape.heads else None,
            drafted=pool_memory((1 + self.num_working, self.nodes, columns), dtype, device),
        )


ONE_PROMPT = StateRoom()
"""Room for forwards of one sequence without trees."""


@dataclass(slots=True)
class _Standing:
    """Where a row of the slot table stands."""

    state: int = NULL_STATE
    position: int = 0  # number of tokens that the state has read
    accepted: int = 0  # number of nodes accepted after them, which the next step replays


class States:
    """The states of running sequences by their rows of the slot table, and the snapshots."""

    def __init__(self, layers: Sequence[LayerStates], room: StateRoom, rows: int, device: torch.device) -> None:
        """`layers`: memory of all recurrent layers; `rows`: rows of the slot table."""
        assert rows <= room.sequences, f"states of {rows} sequences requested, there are {room.sequences}"
        first = 1 + room.num_working
        self.snapshots = range(first, first + room.snapshots)
        self.free = list(reversed(self.snapshots))  # snapshots that can be taken
        self._layers, self._device = layers, device
        self._standing = [_Standing() for _ in range(rows)]
        self._paths = torch.zeros(rows, MAX_DEPTH, dtype=torch.int64, device=device)  # nodes to replay

    def begin(self, row: int, state: int = NULL_STATE, position: int = 0) -> None:
        """Let a row go on from this state, which has read `position` tokens."""
        self._standing[row] = _Standing(state, position)

    def position(self, row: int) -> int:
        """Number of tokens that the state of a row has read."""
        return self._standing[row].position

    @property
    def in_use(self) -> set[int]:
        """The states from which the next steps of running sequences begin."""
        return {standing.state for standing in self._standing}

    def rows(self, extends: Sequence[ExtendRows], nodes: Sequence[int], parents: Tensor) -> StateRows:
        """Lay out a step: which states it reads and writes, which nodes it replays, and where its rows are. Changes
        nothing. `nodes`: node rows of each tree. # parents [sequences, nodes] int64"""
        extend_start, node_start = [0], [sum(extend.num_rows for extend in extends)]
        for extend, count in zip(extends, nodes, strict=True):
            standing = self._standing[extend.table_row]
            reads = standing.position + standing.accepted
            assert reads == extend.start, f"a state that has read {reads} tokens cannot go on at {extend.start}"
            extend_start.append(extend_start[-1] + extend.num_rows)
            node_start.append(node_start[-1] + count)
        lines = [extend.table_row for extend in extends]
        source, target, accepted, starts, node_starts, table_rows = send(
            self._device,
            [self._standing[row].state for row in lines],
            [self._target(row) for row in lines],
            [self._standing[row].accepted for row in lines],
            extend_start,
            node_start,
            lines,
        )
        return StateRows(source, target, self._paths[table_rows], accepted, starts, node_starts, parents)

    def advance(self, extends: Sequence[ExtendRows], accepted: Sequence[int] = (), path: Tensor | None = None) -> None:
        """Take over what a step has written. `accepted`: number of accepted nodes of each sequence that completes, none
        without `path`, which has these nodes. # path [completing, depth] int64"""
        for extend in extends:
            position = extend.start + extend.num_rows
            self._standing[extend.table_row] = _Standing(self._target(extend.table_row), position)
        lines = [extend.table_row for extend in extends if extend.completes]
        for row, count in zip(lines, accepted, strict=path is not None):
            self._standing[row].accepted = count
        if path is not None and path.shape[1]:
            self._paths[send(self._device, lines)[0], : path.shape[1]] = path

    def keep(self, row: int) -> int:
        """Copy the state of a row to a free snapshot, and return that."""
        state, kept = self._standing[row].state, self.free.pop()
        for layer in self._layers:
            for values in (layer.tail, layer.matrix):
                if values is not None:
                    values[kept] = values[state]
        return kept

    def _target(self, row: int) -> int:
        """The state that the next step of a row writes."""
        first = 1 + 2 * row
        return first + (self._standing[row].state == first)
