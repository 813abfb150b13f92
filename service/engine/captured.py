"""Target forwards of a few fixed shapes, captured at start-up and replayed on static buffers.

A step is padded to the smallest shape that holds it, with rows that nobody reads; what fits no shape, such as a long
prompt chunk, runs as it is. Knows neither what rows mean nor how capturing works.
Legend: sequences, rows = of a shape or of a step; length = positions of the slot table.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.tree import MAX_NODES, ROOT
from kernels.tree_attention import AttentionRows
from service.engine.graphs import Graphs
from service.engine.rows import ForwardRows
from service.engine.sampler import CapturedSampler
from service.engine.slots import SlotTable
from service.engine.target import Forward, Target, TargetOutput

SEQUENCES = (1, 2, 4, 8, 16, 32)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Steps of more rows spend their time computing: launching their kernels one by one costs them little."""

_TOKENS, _POSITIONS, _SEQUENCE, _NODE, _SLOTS = range(5)


@dataclass(frozen=True, slots=True)
class Shape:
    """How many sequences and rows a capture holds."""

    sequences: int
    rows: int


def shapes_for(
    max_sequences: int, max_nodes: int, padded: Callable[[int], int], rows: Sequence[int] = ROWS
) -> list[Shape]:
    """The shapes of steps without prompts, fewest sequences first, then fewest rows. `padded` says how many rows a
    forward of so many must have."""
    batches = [*(count for count in SEQUENCES if count < max_sequences), max_sequences]
    return [
        Shape(batch, count)
        for batch in batches
        for count in sorted({padded(min(most, batch * (1 + max_nodes))) for most in rows if most >= batch})
    ]


class StepBuffers:
    """Static inputs of all shapes: the leading part of one set of tensors, made for the largest.

    Rows that only fill up a shape stand first. They are the first token of a text of their own, line 0, whose slot is
    the unread one, so that whatever they compute reaches nobody.
    """

    def __init__(self, sequences: int, rows: int, length: int, *, unread_slot: int, device: torch.device) -> None:
        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        filler = torch.tensor([0, 0, 0, ROOT, unread_slot], device=device)
        self._filler = filler[:, None]  # [tokens, positions, sequence, node, slots; 1]
        self._rows = self._filler.repeat(1, rows)
        self._line_offset = torch.tensor([0, 0, 1, 0, 0], device=device)[:, None]
        self._logit_rows = zeros(rows)
        self._table_rows = torch.arange(1 + sequences, device=device)
        self._lines = zeros(1 + sequences, length)  # the slot table's lines of the step's sequences
        self._lines[0] = unread_slot
        self._extend_end = zeros(1 + sequences)
        self._node_slots = zeros(1 + sequences, MAX_NODES)
        self._node_depths = zeros(1 + sequences, MAX_NODES)
        self._ancestors = zeros(1 + sequences, MAX_NODES, MAX_NODES).bool()

    @property
    def length(self) -> int:
        """Longest slot table that fits."""
        return self._lines.shape[1]

    def fill(self, shape: Shape, rows: ForwardRows, table: SlotTable) -> None:
        """Put a step in, at the end of a shape that holds it."""
        attention, missing = rows.attention, shape.rows - rows.num_rows
        mine = torch.stack([rows.tokens, attention.positions, attention.sequence, attention.node, rows.slots])
        self._rows[:, :missing] = self._filler
        self._rows[:, missing : shape.rows] = mine + self._line_offset
        wanted = rows.logit_rows + missing
        self._logit_rows[: shape.rows] = pad(wanted, (0, shape.rows - wanted.shape[0]))
        lines = slice(1, 1 + attention.table_rows.shape[0])
        self._lines[lines, : table.slots.shape[1]] = table.slots[attention.table_rows]
        self._extend_end[lines] = attention.extend_end
        self._node_slots[lines] = attention.node_slots
        self._node_depths[lines] = attention.node_depths
        self._ancestors[lines] = attention.ancestors

    def run(self, target: Target, shape: Shape) -> TargetOutput:
        """The target's forward of what stands in a shape's part."""
        tokens, positions, sequence, node, slots = self._rows[:, : shape.rows]
        lines = slice(1 + shape.sequences)
        attention = AttentionRows(
            sequence=sequence,
            positions=positions,
            node=node,
            table_rows=self._table_rows[lines],
            extend_end=self._extend_end[lines],
            node_slots=self._node_slots[lines],
            node_depths=self._node_depths[lines],
            ancestors=self._ancestors[lines],
        )
        return target.compute(tokens, attention, slots, self._logit_rows[: shape.rows], self._lines[lines])


class CapturedForward:
    """Replays the capture that a step fits into; its results are overwritten by the next forward."""

    def __init__(self, target: Target, graphs: Graphs, shapes: Iterable[Shape], *, max_length: int) -> None:
        self._otherwise: Forward = target.forward_once
        self._shapes = sorted(shapes, key=lambda shape: (shape.rows, shape.sequences))
        most_rows = self._shapes[-1].rows
        self._buffers = StepBuffers(
            max(shape.sequences for shape in self._shapes),
            most_rows,
            max_length,
            unread_slot=target.pool.unread_slot,
            device=target.device,
        )
        self._logits, self._features = self._outputs(target, most_rows)
        self._sampler = CapturedSampler(graphs, self._logits, {shape.rows for shape in self._shapes})
        self._replays = {
            shape: graphs.capture(self._computation(target, shape)) for shape in reversed(self._shapes)
        }  # the largest first: the others find their memory in the shared pool

    def __call__(self, rows: ForwardRows, table: SlotTable) -> TargetOutput:
        shape = self.shape_of(rows, table)
        if shape is None:
            return self._otherwise(rows, table)
        self._buffers.fill(shape, rows, table)
        self._replays[shape]()
        features = None if self._features is None else self._features[shape.rows - rows.num_rows : shape.rows]
        return TargetOutput(self._logits[: rows.logit_rows.shape[0]], features, self._sampler)

    def shape_of(self, rows: ForwardRows, table: SlotTable) -> Shape | None:
        """The smallest shape that holds a step, by rows and then by sequences."""
        if table.slots.shape[1] > self._buffers.length:
            return None
        sequences = rows.attention.table_rows.shape[0]
        fitting = (shape for shape in self._shapes if shape.rows >= rows.num_rows and shape.sequences >= sequences)
        return next(fitting, None)

    def _outputs(self, target: Target, most_rows: int) -> tuple[Tensor, Tensor | None]:
        """Static results of all shapes, of the kind that a trial forward gives."""
        trial = self._buffers.run(target, self._shapes[0])
        logits = trial.logits.new_zeros(most_rows, *trial.logits.shape[1:])
        return logits, None if trial.features is None else trial.features.new_zeros(
            most_rows, *trial.features.shape[1:]
        )

    def _computation(self, target: Target, shape: Shape) -> Callable[[], None]:
        def compute() -> None:
            output = self._buffers.run(target, shape)
            self._logits[: shape.rows].copy_(output.logits)
            if self._features is not None and output.features is not None:
                self._features[: shape.rows].copy_(output.features)

        return compute


@torch.inference_mode()
def capture_forwards(target: Target, graphs: Graphs, *, max_sequences: int, max_nodes: int, max_length: int) -> None:
    """Let the target replay the steps that decoding makes. Its row multiple must be settled."""
    shapes = shapes_for(max_sequences, max_nodes, lambda rows: rows + target.padding(rows))
    target.run_by(CapturedForward(target, graphs, shapes, max_length=max_length))
