"""States of recurrent layers: what a sequence has read so far, in a form whose size does not grow with its length.

Memory holds states by index. Index 0 is the null state, all zeros, where texts begin. Each row of the slot table has
two working states: a step reads one and writes the other, and the host changes from one to the other only when the step
has succeeded, so that a step that is repeated reads what it has read before. Further indices are snapshots, which the
prefix cache keeps at the ends of prefixes. The inputs of a step's nodes lie in one half of a table of all sequences,
those that the step replays in the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    nodes: int = 0  # most nodes of a step
    snapshots: int = 0  # states of cached prefixes

    @property
    def num_states(self) -> int:
        """Number of states, the null state included."""
        return 1 + 2 * self.sequences + self.snapshots

    @property
    def described(self) -> str:
        """Describe the numbers for the log."""
        return f"states of {self.sequences} sequences and {self.snapshots} prefixes"

    def layer(self, shape: StateShape, dtype: torch.dtype, device: torch.device) -> LayerStates:
        """Allocate the states of a layer, all zeros. `dtype`: type of activations."""
        matrices = self.num_states, shape.heads, shape.key_dim, shape.value_dim
        return LayerStates(
            tail=pool_memory((self.num_states, shape.kernel - 1, shape.columns), torch.float32, device),
            matrix=pool_memory(matrices, torch.float32, device) if shape.heads else None,
            drafted=pool_memory((2 * self.nodes, shape.input_columns), dtype, device),
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
        self.snapshots = range(room.num_states - room.snapshots, room.num_states)
        self.free = list(reversed(self.snapshots))  # snapshots that can be taken
        self.most_nodes = room.nodes
        self._first_kept = 0  # row of `LayerStates.drafted`, of the half that the next step with nodes writes
        self._layers, self._device = layers, device
        self._standing = [_Standing() for _ in range(rows)]
        self._paths = torch.zeros(rows, MAX_DEPTH, dtype=torch.int64, device=device)  # inputs to replay

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
        lines = [extend.table_row for extend in extends]
        standing = [self._standing[row] for row in lines]
        for one, extend in zip(standing, extends, strict=True):
            read = one.position + one.accepted
            assert read == extend.start, f"a state that has read {read} tokens cannot go on at {extend.start}"
        absent = {row for row, one in enumerate(self._standing) if one.accepted}.difference(lines)
        most = 0 if absent else self.most_nodes
        assert sum(nodes) <= most, f"no room for the inputs of {sum(nodes)} nodes, while rows {absent} wait for theirs"
        starts = [*accumulate((extend.num_rows for extend in extends), initial=0)]
        node_starts = [*accumulate(nodes, initial=starts[-1])]
        kept = [self._first_kept + start - starts[-1] for start in node_starts[:-1]]
        begun, targets = [one.state for one in standing], [self._target(row) for row in lines]
        table_rows, source, target, *others = send(
            self._device, lines, begun, targets, [one.accepted for one in standing], kept, starts, node_starts
        )
        return StateRows(*(source, target, self._paths[table_rows], *others, parents))

    def advance(self, extends: Sequence[ExtendRows], accepted: Sequence[int] = (), path: Tensor | None = None) -> None:
        """Take over what a step has written. `accepted`: number of accepted nodes of each sequence that completes, none
        without `path`, which has the forward's rows of root and accepted nodes. # path [completing, 1 + depth] int64"""
        for extend in extends:
            position = extend.start + extend.num_rows
            self._standing[extend.table_row] = _Standing(self._target(extend.table_row), position)
        lines = [extend.table_row for extend in extends if extend.completes]
        for row, count in zip(lines, accepted, strict=path is not None):
            self._standing[row].accepted = count
        if path is not None and path.shape[1] > 1:
            first = self._first_kept - sum(extend.num_rows for extend in extends)
            self._paths[send(self._device, lines)[0], : path.shape[1] - 1] = path[:, 1:] + first
            self._first_kept = self.most_nodes - self._first_kept

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
