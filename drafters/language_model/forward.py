"""Forwards of a drafting language model: committed positions it has not run, and draft trees level by level.

For attention a tree's root is its first node, because its slot is unknown before the target has run it.
Legend: batch = drafting sequences, beam = nodes of a level that are continued, nodes = of all levels so far."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.language_model.sequences import SequenceTable
from kernels.staging import send
from kernels.tree_attention import AttentionRows

_AT_ONCE = 256
"""Positions of one sequence in a forward: what a step reads of a prompt by default."""


class Output(Protocol):
    """Result of a forward."""

    @property
    def logits(self) -> Tensor:
        """# [logits, vocab]"""


class LanguageModel(Protocol):
    """A causal language model whose keys and values are stored under the target's slot ids. Its pool has more entries,
    for nodes of draft trees. Implemented by the code that loads models."""

    vocab_size: int

    @property
    def scratch(self) -> Tensor:
        """Pool indices after the slots, for this drafter alone. # [entries] int64"""

    def compute(
        self, tokens: Tensor, attention: AttentionRows, slots: Tensor, logit_rows: Tensor, slot_table: Tensor
    ) -> Output:
        """Run rows: write keys and values to `slots`, return logits of `logit_rows`. # tokens, slots [rows] int64;
        logit_rows [logits] int64; slot_table [table rows, positions] int64"""


class LevelNodes(NamedTuple):
    """The rows of each sequence's tree so far, the root first."""

    rows: Tensor  # [batch] int64, of `SequenceTable`
    roots: Tensor  # [batch] int64, absolute positions
    depths: Tensor  # [batch, nodes] int64, 1 for the root
    ancestors: Tensor  # [batch, nodes, nodes] bool, the node itself included

    @property
    def num_rows(self) -> int:
        """Rows of each tree."""
        return self.depths.shape[1]


class TreeForward:
    """Runs a model on sequences and on the trees that grow after them."""

    def __init__(self, model: LanguageModel, table: SequenceTable, *, nodes: int) -> None:
        """`nodes`: most rows of a tree."""
        self._model, self._table = model, table
        self._scratch = model.scratch[: len(model.scratch) // nodes * nodes].view(-1, nodes)  # [trees, nodes]

    @property
    def num_trees(self) -> int:
        """Trees that there is room for."""
        return self._scratch.shape[0]

    def follow(self, row: int, positions: range) -> Tensor:
        """Run a range of a sequence's positions, and return their slots. # -> [positions] int64"""
        device = self._table.slots.device
        table_rows = torch.tensor([row], device=device)
        for start in range(positions.start, positions.stop, _AT_ONCE):
            span = range(start, min(start + _AT_ONCE, positions.stop))
            end = torch.tensor([span.stop - 1], device=device)
            none = end.new_zeros(1, 0)
            self._run([span], LevelNodes(table_rows, end + 1, none, none[..., None].bool()), none)
        return self._table.slots[row, positions.start : positions.stop]

    def root(self, rows: Tensor, roots: Tensor, missing: Sequence[range]) -> tuple[Tensor, LevelNodes]:
        """Run the trees' roots, and before them the missing positions of each sequence. # rows, roots [batch] int64
        -> logits [batch, 1, vocab]"""
        depths = torch.ones_like(rows)[:, None]
        nodes = LevelNodes(rows, roots, depths, depths[..., None].bool())
        return self._run(missing, nodes, self._table.tokens[rows, roots][:, None]), nodes

    def deeper(self, tokens: Tensor, parents: Tensor, nodes: LevelNodes) -> tuple[Tensor, LevelNodes]:
        """Run one more node below each parent. # tokens, parents [batch, beam] int64, parents as rows of their tree
        -> logits [batch, beam, vocab]"""
        beam, known = tokens.shape[1], nodes.num_rows
        above = nodes.ancestors.gather(1, parents[:, :, None].expand(-1, -1, known))
        own = torch.eye(beam, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        grown = nodes._replace(
            depths=torch.cat([nodes.depths, nodes.depths.gather(1, parents) + 1], dim=1),
            ancestors=torch.cat([pad(nodes.ancestors, (0, beam)), torch.cat([above, own], dim=2)], dim=1),
        )
        return self._run((), grown, tokens), grown

    def _run(self, extends: Sequence[range], nodes: LevelNodes, tokens: Tensor) -> Tensor:
        """Run a range of positions of each sequence, then the last nodes of the trees, which have these tokens.
        # tokens [batch, beam] -> logits [batch, beam, vocab]; without nodes those of the last position"""
        (batch, beam), device = tokens.shape, tokens.device
        sequences, positions = send(
            device,
            [number for number, span in enumerate(extends) for _ in span],
            [position for span in extends for position in span],
        )
        table, known = self._table, nodes.num_rows
        place = torch.arange(known - beam, known, device=device).expand(batch, -1)
        depths = nodes.depths[:, known - beam :]
        slots = self._scratch[:batch, :known]
        ends = nodes.roots - 1
        attention = AttentionRows(
            sequence=torch.cat([sequences, torch.arange(batch, device=device).repeat_interleave(beam)]),
            positions=torch.cat([positions, (ends[:, None] + depths).flatten()]),
            node=torch.cat([torch.full_like(sequences, -1), place.flatten()]),
            table_rows=nodes.rows,
            extend_end=ends,
            node_slots=slots,
            node_depths=nodes.depths,
            ancestors=nodes.ancestors,
        )
        committed = nodes.rows[sequences], positions
        wanted = max(1, batch * beam)
        output = self._model.compute(
            torch.cat([table.tokens[committed], tokens.flatten()]),
            attention,
            torch.cat([table.slots[committed], slots[:, known - beam :].flatten()]),
            torch.arange(len(attention.sequence) - wanted, len(attention.sequence), device=device),
            table.slots,
        )
        return output.logits.view(batch, max(1, beam), -1)
