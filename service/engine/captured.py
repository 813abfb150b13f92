"""Runs target forwards by CUDA graphs captured in a few padded shapes. A forward that fits into none of them, such as a
long prompt chunk, runs eagerly.

Legend: sequences, rows = numbers in a captured shape or in a step; length = positions per row of the slot table.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.tree import ROOT
from kernels.graph_runner import Capture, GraphRunner, batches_up_to
from kernels.rows import ForwardRows
from kernels.tree_attention import AttentionRows
from service.engine.kv_pool import SlotTable
from service.engine.sampling import Sampler
from service.engine.target import Target, TargetOutput

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Captured numbers of rows. Larger steps are compute-bound, so launching their kernels one by one costs little."""


class Shape(NamedTuple):
    """Size of a capture: maximum numbers of sequences, of rows, and of nodes per sequence."""

    sequences: int
    rows: int
    nodes: int


class CapturedForward:
    """Runs a step's forward in the smallest captured shape that holds it. The next call overwrites the results."""

    def __init__(self, target: Target, capture: Capture, shapes: Iterable[Shape], *, max_length: int) -> None:
        self._target = target
        largest_first = sorted(shapes, key=lambda shape: (shape.rows, shape.sequences), reverse=True)
        most_sequences, self._most_rows = max(shape.sequences for shape in largest_first), largest_first[0].rows
        padded = ((_padding(shape, max_length, target), ()) for shape in largest_first)
        self._table_rows = torch.arange(most_sequences + 1, device=target.device)
        self._runner: GraphRunner[tuple[Tensor, ...]] = GraphRunner(partial(_forward, target), capture, padded)
        logits = self._runner.results[0][0]
        self._sampler = Sampler(capture, logits, {shape.rows for shape in largest_first})

    def __call__(self, rows: ForwardRows, table: SlotTable, features: bool = True) -> TargetOutput:
        of_table = rows.attention.table_rows
        if rows.num_rows > self._most_rows or len(of_table) >= len(self._table_rows):
            return self._target.forward_once(rows, table, features)
        attention = _tensors_of(replace(rows.attention, table_rows=self._table_rows[: len(of_table)]))
        logits, *tapped = self._runner((rows.tokens, attention, rows.slots, rows.logit_rows, table.slots[of_table]))
        taken = tapped[0][: rows.num_rows] if tapped and features else None
        return TargetOutput(logits[: rows.logit_rows.shape[0]], taken, self._sampler)


def _tensors_of(attention: AttentionRows) -> tuple[Tensor, ...]:
    """All fields as a tuple, the form that `GraphRunner` accepts. # shapes: see `AttentionRows`"""
    return tuple(getattr(attention, name) for name in AttentionRows.__slots__)


def _forward(target: Target, tokens: Tensor, attention: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Compute logits, and features if the target has tapped layers. # tokens, inputs: see `Target.compute`; attention:
    see `_tensors_of`"""
    output = target.compute(tokens, AttentionRows(*attention), *inputs)
    return (output.logits,) if output.features is None else (output.logits, output.features)


def _padding(shape: Shape, length: int, target: Target) -> tuple[Tensor | tuple[Tensor, ...], ...]:
    """Arguments of `_forward` for a forward of dummy rows only.

    Dummy rows belong to an additional sequence after all others. Its slot is never read by the others, so the rows
    have no effect.
    """
    sequences, unread_slot, device = shape.sequences + 1, target.pool.unread_slot, target.device
    row = torch.zeros((), dtype=torch.int64, device=device).expand(shape.rows)
    tree = row[:1].expand(sequences, shape.nodes)
    attention = AttentionRows(
        sequence=row + shape.sequences,
        positions=row,
        node=row + ROOT,
        table_rows=torch.arange(sequences, device=device),
        extend_end=row[:1].expand(sequences),
        node_slots=tree,
        node_depths=tree,
        ancestors=tree[:, None].expand(-1, shape.nodes, -1).bool(),
    )
    return row, _tensors_of(attention), row + unread_slot, row, row[:1].expand(sequences, length) + unread_slot


def shapes_for(max_sequences: int, max_nodes: int, rows: Sequence[int] = ROWS) -> list[Shape]:
    """List the shapes to capture for decoding steps of up to `max_sequences` sequences with `max_nodes` nodes each."""
    return [
        Shape(batch, count, max_nodes)
        for batch in batches_up_to(max_sequences)
        for count in sorted({min(most, batch * (1 + max_nodes)) for most in rows if most >= batch})
    ]


@torch.inference_mode()
def capture_forwards(target: Target, capture: Capture, *, max_sequences: int, max_nodes: int, max_length: int) -> None:
    """Capture the forwards of decoding steps, and make the target use them from now on."""
    shapes = shapes_for(max_sequences, max_nodes)
    target.run_by(CapturedForward(target, capture, shapes, max_length=max_length), capture)
