"""Layout of one forward's rows: extends (prompt chunks and roots) and draft trees of all sequences, flattened.

All extend rows come first, sequence by sequence and by position; then all tree nodes, parents before children.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.graph_runner import send
from kernels.recurrence import StateRows
from kernels.tree_attention import AttentionRows
from kernels.trees import ROOT, DraftTree

Place = Callable[[tuple[Tensor, ...]], tuple[Tensor, Tensor, Tensor, Tensor]]
"""Fills in what depends on the trees: (tokens, positions, sequence, node, slots, each [rows]; positions of roots
[lines]; trees' tokens, parents, depths [lines, nodes]) -> tokens and positions [rows] with the nodes' values, slots of
the nodes [lines, nodes], and their ancestor matrix [lines, nodes, nodes]."""


@dataclass(frozen=True, slots=True)
class ExtendRows:
    """Tokens of one sequence that this step certainly commits: a prompt chunk, or the root."""

    table_row: int
    start: int  # absolute position of the first token
    tokens: Sequence[int]
    completes: bool  # whether the last token is the sequence's newest, so that the step chooses the next token

    @property
    def num_rows(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


class Ahead(NamedTuple):
    """What the step before has chosen for sequences of a step that was planned before the host knew it. Each has one
    extend row, as have all sequences before it; its planned position is right if no node was accepted."""

    sequences: Tensor  # [ahead] int64, index among the step's sequences
    tokens: Tensor  # [ahead] int64, newest token of each
    accepted: Tensor  # [ahead] int64, number of nodes that the step before accepted
    most: int  # largest number that it can have accepted

    def added(self, values: Tensor, *, sign: int = 1) -> Tensor:
        """Add the accepted nodes to a value of each of the step's sequences. # [sequences or more] int64 -> like it"""
        return values.index_add(0, self.sequences, self.accepted, alpha=sign)


@dataclass(frozen=True, slots=True)
class ForwardRows:
    """Rows of one forward, and which of their logits choose a token."""

    tokens: Tensor  # [rows] int64
    attention: AttentionRows
    slots: Tensor  # [rows] int64, slots that keys and values are written to
    num_extend_rows: int
    logit_rows: Tensor  # [logits] int64, rows that choose a token: each completing extend's last row, then all nodes
    logit_sequence: Tensor  # [logits] int64, index among the completing sequences
    logit_places: Tensor  # [logits] int64, tree index of the choice: 0 after the root, 1 + i after node i
    completing: Tensor  # [completing sequences] int64, index among all sequences of the forward
    num_nodes: Tensor  # [completing sequences] int64, number of node rows, padding included
    states: StateRows | None = field(default=None, kw_only=True)  # None if the model has no recurrent layers

    @property
    def num_rows(self) -> int:
        """Number of rows, padding included."""
        return self.tokens.shape[0]


def lay_out_rows(
    extends: Sequence[ExtendRows],
    nodes: Sequence[int],
    tree: DraftTree,
    slots: Tensor,
    table: Tensor,
    place: Place,
    ahead: Ahead | None = None,
) -> ForwardRows:
    """Lay out extends and trees into rows, and write the slots of extend rows, which cannot be rejected, into the table
    in place. Tree i belongs to extend i. `nodes`: number of node rows of each tree, at least its number of nodes;
    padding rows have the root's position, and no row sees them. `place` computes on the device what depends on the
    trees' values. `ahead`: newest tokens that only the device knows; None if the host knows all.
    # slots [rows] int64, one per extend token and node row; table [table rows, max positions] int64"""
    lengths = np.array([extend.num_rows for extend in extends])
    starts, table_rows = (np.array(values) for values in zip(*((e.start, e.table_row) for e in extends), strict=True))
    tokens_read = np.fromiter(chain.from_iterable(extend.tokens for extend in extends), np.int64)
    completes = np.flatnonzero([extend.completes for extend in extends])
    node_counts = np.asarray(nodes)
    read, number_read = _numbered(lengths)
    of_nodes, number = _numbered(node_counts)
    unknown, ends = np.zeros_like(of_nodes), lengths.cumsum()
    columns = send(
        slots.device,
        np.concatenate([tokens_read, unknown]),
        np.concatenate([starts[read] + number_read, unknown]),
        np.concatenate([read, of_nodes]),
        np.concatenate([np.full_like(read, ROOT), number]),
        starts + lengths - 1,
        table_rows,
        table_rows[read],
        np.concatenate([ends[completes] - 1, ends[-1] + np.arange(len(of_nodes))]),
        np.concatenate([np.arange(len(completes)), completes.searchsorted(of_nodes)]),
        np.concatenate([np.zeros_like(completes), number + 1]),
        completes,
        node_counts[completes],
    )
    tokens, positions, sequence, node, extend_end, lines = columns[:6]
    if ahead is not None:
        tokens = tokens.index_copy(0, ahead.sequences, ahead.tokens)
        positions, extend_end = ahead.added(positions), ahead.added(extend_end)
    node_slots, ancestors = tree.tokens, tree.tokens.new_empty(tree.batch, 0, 0, dtype=torch.bool)  # no nodes
    if tree.width:
        shape = tokens, positions, sequence, node, slots, extend_end
        placed = place((*shape, tree.tokens, tree.parents, tree.depths))
        tokens, positions = (values[: len(tokens)] for values in placed[:2])
        node_slots = placed[2][: tree.batch, : tree.width]
        ancestors = placed[3][: tree.batch, : tree.width, : tree.width]
    attention = AttentionRows(sequence, positions, node, lines, extend_end, node_slots, tree.depths, ancestors)
    written, *choosing = columns[6:]
    extend_rows = len(tokens_read)
    table[written, positions[:extend_rows]] = slots[:extend_rows]
    return ForwardRows(tokens, attention, slots, extend_rows, *choosing)


def _numbered(counts: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return for each item its line and its index in the line, for lines of these lengths.
    # counts [lines] -> [items], [items]"""
    lines = np.repeat(np.arange(len(counts)), counts)
    return lines, np.arange(len(lines)) - (counts.cumsum() - counts)[lines]
