"""One forward's rows, laid out by `kernels.ops`; captured where forwards are."""

from collections.abc import Sequence as Items
from itertools import product

import torch
from torch import Tensor

from drafters.tree import ROOT, DraftTree
from kernels import ops
from kernels.graph_runner import Capture, GraphRunner, batches_up_to
from kernels.rows import ExtendRows as ExtendRows
from kernels.rows import ForwardRows as ForwardRows
from kernels.tree_attention import NULL_SLOT


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
        self._place = GraphRunner(placed, capture, ((_padding(*shape, device), ()) for shape in shapes if shape[1]))

    def __call__(
        self, extends: Items[ExtendRows], tree: DraftTree, slots: Tensor, table: Tensor, nodes: Items[int]
    ) -> ForwardRows:
        """As `kernels.rows.lay_out_rows`; the next call may overwrite the result."""
        return ops.on(slots.device).lay_out_rows(extends, nodes, tree, slots, table, self._place)


def fixed_shapes(max_sequences: int, widths: Items[int]) -> list[tuple[int, int]]:
    """Sequences and widths of decoding steps, the most rows first."""
    shapes = product(batches_up_to(max_sequences), (*widths, 0))
    return sorted(shapes, key=lambda shape: (shape[0] * (1 + shape[1]), shape), reverse=True)


def _padding(batch: int, width: int, device: torch.device | str) -> tuple[Tensor, ...]:
    """Roots of a sequence of nobody's."""
    row = torch.zeros(batch * (1 + width), dtype=torch.int64, device=device)
    line, nodes = row[:batch], torch.zeros(batch, width, dtype=torch.int64, device=device)
    return row, row, row + batch - 1, row + ROOT, row, line, nodes, nodes + ROOT, nodes


def placed(
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
    """As `kernels.rows.Place`."""
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
