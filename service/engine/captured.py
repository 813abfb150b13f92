"""Target forwards captured in a few padded shapes; a forward that fits none, such as a long prompt chunk, runs eagerly.

Legend: sequences, rows = of a shape or of a step; length = positions of the slot table.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.tree import ROOT
from kernels.graph_runner import BATCHES, Capture, GraphRunner
from kernels.rows import ForwardRows
from kernels.tree_attention import AttentionRows
from service.engine.kv_pool import SlotTable
from service.engine.sampling import Sampler
from service.engine.target import Target, TargetOutput

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Captured numbers of rows. Larger steps are bound by computing: launching their kernels one by one costs little."""


class Shape(NamedTuple):
    """Most sequences and rows of a capture, and nodes of each sequence."""

    sequences: int
    rows: int
    nodes: int


class PaddedRows(NamedTuple):
    """Inputs of a forward. Padding rows belong to a dummy sequence after all others, whose slot is never read by the
    others, so what they compute has no effect."""

    tokens: Tensor  # [rows] int64; this and the next five
    positions: Tensor
    sequence: Tensor
    node: Tensor
    slots: Tensor
    logit_rows: Tensor
    slot_table: Tensor  # [sequences + 1, length] int64, the table's rows of the step's sequences
    extend_end: Tensor  # [sequences + 1] int64; this and what follows as of `AttentionRows`
    node_slots: Tensor
    node_depths: Tensor
    ancestors: Tensor

    @staticmethod
    def of(rows: ForwardRows, table: SlotTable) -> "PaddedRows":
        """The inputs of a step."""
        attention = rows.attention
        return PaddedRows(
            rows.tokens,
            attention.positions,
            attention.sequence,
            attention.node,
            rows.slots,
            rows.logit_rows,
            table.slots[attention.table_rows],
            attention.extend_end,
            attention.node_slots,
            attention.node_depths,
            attention.ancestors,
        )

    @staticmethod
    def padding(shape: Shape, length: int, target: Target) -> "PaddedRows":
        """Inputs of a shape that holds dummy rows alone."""
        sequences, unread_slot, device = shape.sequences + 1, target.pool.unread_slot, target.device

        def zeros(*size: int) -> Tensor:
            return torch.zeros((), dtype=torch.int64, device=device).expand(size)

        return PaddedRows(
            zeros(shape.rows),
            zeros(shape.rows),
            zeros(shape.rows) + shape.sequences,
            zeros(shape.rows) + ROOT,
            zeros(shape.rows) + unread_slot,
            zeros(shape.rows),
            zeros(sequences, length) + unread_slot,
            zeros(sequences),
            zeros(sequences, shape.nodes),
            zeros(sequences, shape.nodes),
            zeros(sequences, shape.nodes, shape.nodes).bool(),
        )


class CapturedForward:
    """Runs a step in the smallest captured shape that holds it; the next one overwrites its results."""

    def __init__(self, target: Target, capture: Capture, shapes: Iterable[Shape], *, max_length: int) -> None:
        self._target = target
        largest_first = sorted(shapes, key=lambda shape: (shape.rows, shape.sequences), reverse=True)
        largest = Shape(max(shape.sequences for shape in largest_first), *largest_first[0][1:])
        self.largest = largest
        self.max_length = max_length
        padded = [((*PaddedRows.padding(shape, max_length, target),), ()) for shape in largest_first]
        table_rows = torch.arange(largest.sequences + 1, device=target.device)
        self._runner: GraphRunner[tuple[Tensor, ...]] = GraphRunner(
            partial(_forward, target, table_rows), capture, padded
        )
        logits = self._runner.results[0][0]
        self._sampler = Sampler(capture, logits, {shape.rows for shape in largest_first})

    def __call__(self, rows: ForwardRows, table: SlotTable) -> TargetOutput:
        if not self.holds(rows, table):
            return self._target.forward_once(rows, table)
        logits, *features = self._runner(PaddedRows.of(rows, table))
        taken = features[0][: rows.num_rows] if features else None
        return TargetOutput(logits[: rows.logit_rows.shape[0]], taken, self._sampler)

    def holds(self, rows: ForwardRows, table: SlotTable) -> bool:
        """Whether a captured shape holds these rows."""
        sequences = rows.attention.table_rows.shape[0]
        fits = rows.num_rows <= self.largest.rows and sequences <= self.largest.sequences
        fits = fits and rows.attention.node_slots.shape[1] <= self.largest.nodes
        return fits and table.slots.shape[1] <= self.max_length


def _forward(target: Target, table_rows: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Logits, and features where the target taps them. # table_rows [sequences + 1]; inputs as of `PaddedRows`"""
    rows = PaddedRows(*inputs)
    attention = AttentionRows(
        sequence=rows.sequence,
        positions=rows.positions,
        node=rows.node,
        table_rows=table_rows[: rows.slot_table.shape[0]],
        extend_end=rows.extend_end,
        node_slots=rows.node_slots,
        node_depths=rows.node_depths,
        ancestors=rows.ancestors,
    )
    output = target.compute(rows.tokens, attention, rows.slots, rows.logit_rows, rows.slot_table)
    return (output.logits,) if output.features is None else (output.logits, output.features)


def shapes_for(max_sequences: int, max_nodes: int, rows: Sequence[int] = ROWS) -> list[Shape]:
    """Shapes of decoding steps, fewest sequences first, then fewest rows."""
    batches = [*(count for count in BATCHES if count < max_sequences), max_sequences]
    return [
        Shape(batch, count, max_nodes)
        for batch in batches
        for count in sorted({min(most, batch * (1 + max_nodes)) for most in rows if most >= batch})
    ]


@torch.inference_mode()
def capture_forwards(target: Target, capture: Capture, *, max_sequences: int, max_nodes: int, max_length: int) -> None:
    """Capture the forwards of decoding steps, and let the target run by them."""
    shapes = shapes_for(max_sequences, max_nodes)
    target.run_by(CapturedForward(target, capture, shapes, max_length=max_length), capture)
