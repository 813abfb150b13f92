"""One forward's rows: extends (prompt chunks and roots) and draft trees of all scheduled sequences, flattened.

All extend rows come first, sequence by sequence and by position; then all tree nodes, parents before children.
"""

from collections.abc import Sequence
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafters.tree import ROOT, DraftTree
from kernels import ops
from kernels.graph_runner import Capture, GraphRunner, batches_up_to
from kernels.staging import send
from kernels.tree_attention import NULL_SLOT, AttentionRows


@dataclass(frozen=True, slots=True)
class ExtendRows:
    """Tokens of one sequence that are certain to be committed by this step."""

    table_row: int
    start: int  # absolute position of the first token
    tokens: Sequence[int]
    completes: bool  # the last token is the newest of the text, so the step chooses the next one

    @property
    def num_rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ForwardRows:
    """The rows of one forward and what becomes of each."""

    tokens: Tensor  # [rows] int64
    attention: AttentionRows
    slots: Tensor  # [rows] int64, where each row's keys and values go
    extend_table_rows: Tensor  # [extend rows] int64, lines of the slot table
    logit_rows: Tensor  # [logits] int64, whose next token is chosen: each completing extend's last row, then all nodes
    logit_sequence: Tensor  # [logits] int64, which of the completing sequences
    logit_places: Tensor  # [logits] int64, where among its sequence's choices: 0 behind the root, then by node
    completing: Tensor  # [completing sequences] int64, their lines among all sequences of the forward
    num_nodes: Tensor  # [completing sequences] int64, rows of nodes, those of padding included

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_extend_rows(self) -> int:
        return self.extend_table_rows.shape[0]


class RowLayout:
    """Lays out extends and trees into rows; captured, in steps of up to `max_sequences` and some widths of trees."""

    def __init__(
        self,
        capture: Capture | None = None,
        widths: Items[int] = (),
        *,
        max_sequences: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        shapes = fixed_shapes(max_sequences, widths) if capture else []
        self._place = GraphRunner(_placed, capture, ((_padding(*shape, device), ()) for shape in shapes if shape[1]))

    def __call__(self, extends: Items[ExtendRows], tree: DraftTree, slots: Tensor, nodes: Items[int]) -> ForwardRows:
        """Tree line i belongs to extend i. `nodes` counts the rows of each line's nodes, at least as many as its tree
        has: rows of padding stand where the root does, and nobody sees them. The next call may overwrite the result.
        # slots [rows] int64, one per extend token and row of a node"""
        lengths = np.array([extend.num_rows for extend in extends])
        starts, table_rows = (
            np.array(values) for values in zip(*((e.start, e.table_row) for e in extends), strict=True)
        )
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
        tokens, positions, sequence, node, extend_end, extend_rows = columns[:6]
        node_slots, ancestors = tree.tokens, tree.tokens[..., None].bool()  # of no nodes
        if tree.width:
            shape = tokens, positions, sequence, node, slots, extend_end
            placed = self._place((*shape, tree.tokens, tree.parents, tree.depths))
            tokens, positions = (values[: len(tokens)] for values in placed[:2])
            node_slots = placed[2][: tree.batch, : tree.width]
            ancestors = placed[3][: tree.batch, : tree.width, : tree.width]
        attention = AttentionRows(
            sequence, positions, node, extend_rows, extend_end, node_slots, tree.depths, ancestors
        )
        written, logit_rows, logit_sequence, logit_places, completing, num_nodes = columns[6:]
        return ForwardRows(
            tokens, attention, slots, written, logit_rows, logit_sequence, logit_places, completing, num_nodes
        )


def _numbered(counts: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Of each item its line and its number there, for lines of so many items. # counts [lines] -> [items], [items]"""
    lines = np.repeat(np.arange(len(counts)), counts)
    return lines, np.arange(len(lines)) - (counts.cumsum() - counts)[lines]


def fixed_shapes(max_sequences: int, widths: Items[int]) -> list[tuple[int, int]]:
    """Sequences and widths of decoding steps, the most rows first."""
    shapes = product(batches_up_to(max_sequences), (*widths, 0))
    return sorted(shapes, key=lambda shape: (shape[0] * (1 + shape[1]), shape), reverse=True)


def _padding(batch: int, width: int, device: torch.device | str) -> tuple[Tensor, ...]:
    """Roots of a sequence of nobody's."""
    row = torch.zeros(batch * (1 + width), dtype=torch.int64, device=device)
    line, nodes = row[:batch], torch.zeros(batch, width, dtype=torch.int64, device=device)
    return row, row, row + batch - 1, row + ROOT, row, line, nodes, nodes + ROOT, nodes


def _placed(
    tokens: Tensor,
    positions: Tensor,
    sequence: Tensor,
    node: Tensor,
    slots: Tensor,
    extend_end: Tensor,
    tree_tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and positions of all rows, those of nodes by their trees; of each line its nodes' slots, and who is on
    whose path. # sequence, node, slots, tokens, positions [rows]; extend_end [lines]; tree_tokens, parents, depths
    [lines, nodes]"""
    lines, width = parents.shape
    is_node = node >= 0
    at = sequence, node.clamp(min=0)
    tokens = torch.where(is_node, tree_tokens[at], tokens)
    positions = torch.where(is_node, extend_end[sequence] + depths[at], positions)
    node_slots = slots.new_full((lines, width + 1), NULL_SLOT)  # behind the nodes: what is none
    node_slots[sequence, torch.where(is_node, node, width)] = slots
    return tokens, positions, node_slots[:, :width], ops.on(slots.device).ancestor_matrix(parents)


flatten = RowLayout()
"""Without captures."""
