"""One forward's rows: extends (prompt chunks and roots) and draft trees of all scheduled sequences, flattened.

All extend rows come first, sequence by sequence and by position; then all tree nodes, parents before children.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.graph_runner import send
from kernels.tree_attention import AttentionRows
from kernels.trees import ROOT, DraftTree

Place = Callable[[tuple[Tensor, ...]], tuple[Tensor, Tensor, Tensor, Tensor]]
"""Tokens, positions, sequence, node, slots [rows], positions of roots [lines], tokens, parents, depths [lines, nodes]
-> tokens, positions [rows], those of nodes from their trees; slots [lines, nodes] and ancestor matrix of the nodes."""


@dataclass(frozen=True, slots=True)
class ExtendRows:
    """Tokens of one sequence that are certain to be committed by this step."""

    table_row: int
    start: int  # absolute position of the first token
    tokens: Sequence[int]
    completes: bool  # True if the last token is the sequence's newest: the step chooses the next one

    @property
    def num_rows(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ForwardRows:
    """The rows of one forward, and which of their logits choose a token."""

    tokens: Tensor  # [rows] int64
    attention: AttentionRows
    slots: Tensor  # [rows] int64, where each row's keys and values go
    num_extend_rows: int
    logit_rows: Tensor  # [logits] int64, whose next token is chosen: each completing extend's last row, then all nodes
    logit_sequence: Tensor  # [logits] int64, which of the completing sequences
    logit_places: Tensor  # [logits] int64, index among its sequence's choices: 0 after the root, 1 + i after node i
    completing: Tensor  # [completing sequences] int64, their lines among all sequences of the forward
    num_nodes: Tensor  # [completing sequences] int64, rows of nodes, padding included

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
) -> ForwardRows:
    """Lay out extends and trees into rows, and write the slots of extend rows into the table, in place: they cannot be
    rejected. Tree i belongs to extend i. `nodes` is the number of node rows per line, at least as many as its tree has:
    padding rows have the root's position, and no row sees them.
    # slots [rows] int64, one per extend token and row of a node; table [table rows, max positions] int64

    `place` computes on the device the parts that depend on the trees' values.
    """
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
    """Line of each item, and its index in the line, for lines of these lengths. # counts [lines] -> [items], [items]"""
    lines = np.repeat(np.arange(len(counts)), counts)
    return lines, np.arange(len(lines)) - (counts.cumsum() - counts)[lines]
