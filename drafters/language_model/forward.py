"""Forwards of a drafting language model: committed positions it has not run, and draft trees level by level.

To attention a tree's root is its first node: its slot is not known before the target has run it.
Legend: batch = drafting sequences, beam = nodes of a level that are continued, nodes = of all levels so far."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.language_model.model import LanguageModel
from drafters.language_model.texts import Texts
from kernels.staging import send
from kernels.tree_attention import AttentionRows

_AT_ONCE = 256
"""Positions of one text in a forward: what a step reads of a prompt by default."""


class Nodes(NamedTuple):
    """The rows of each sequence's tree so far, the root first."""

    rows: Tensor  # [batch] int64, of the table of texts
    roots: Tensor  # [batch] int64, absolute positions
    depths: Tensor  # [batch, nodes] int64, of the root 1
    ancestors: Tensor  # [batch, nodes, nodes] bool, who is on whose path, itself included

    @property
    def num_rows(self) -> int:
        return self.depths.shape[1]


class TreeForward:
    """Runs a model on texts and on the trees that grow behind them."""

    def __init__(self, model: LanguageModel, texts: Texts, *, nodes: int) -> None:
        """`nodes`: most rows of a tree."""
        self._model, self._texts = model, texts
        self._scratch = model.scratch[: len(model.scratch) // nodes * nodes].view(-1, nodes)  # [lines, nodes]

    @property
    def num_lines(self) -> int:
        """Trees there is room for."""
        return self._scratch.shape[0]

    def follow(self, row: int, positions: range) -> Tensor:
        """Run so much of a text. # -> [positions] int64, the slots in which that lies"""
        device = self._texts.slots.device
        lines = torch.tensor([row], device=device)
        for start in range(positions.start, positions.stop, _AT_ONCE):
            span = range(start, min(start + _AT_ONCE, positions.stop))
            end = torch.tensor([span.stop - 1], device=device)
            none = end.new_zeros(1, 0)
            self._run([span], Nodes(lines, end + 1, none, none[..., None].bool()), none)
        return self._texts.slots[row, positions.start : positions.stop]

    def root(self, rows: Tensor, roots: Tensor, missing: Sequence[range]) -> tuple[Tensor, Nodes]:
        """Run the trees' roots, and before them what is missing of each text. # rows, roots [batch] int64
        -> logits [batch, 1, vocab]"""
        depths = torch.ones_like(rows)[:, None]
        nodes = Nodes(rows, roots, depths, depths[..., None].bool())
        return self._run(missing, nodes, self._texts.tokens[rows, roots][:, None]), nodes

    def deeper(self, tokens: Tensor, parents: Tensor, nodes: Nodes) -> tuple[Tensor, Nodes]:
        """Run one more node below each of these. # tokens, parents [batch, beam] int64, parents by their place among
        the rows of their tree -> logits [batch, beam, vocab]"""
        beam, known = tokens.shape[1], nodes.num_rows
        above = nodes.ancestors.gather(1, parents[:, :, None].expand(-1, -1, known))
        own = torch.eye(beam, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        grown = nodes._replace(
            depths=torch.cat([nodes.depths, nodes.depths.gather(1, parents) + 1], dim=1),
            ancestors=torch.cat([pad(nodes.ancestors, (0, beam)), torch.cat([above, own], dim=2)], dim=1),
        )
        return self._run((), grown, tokens), grown

    def _run(self, extends: Sequence[range], nodes: Nodes, tokens: Tensor) -> Tensor:
        """Positions of texts, a range for each sequence, then the last of the trees' nodes, whose tokens these are.
        # tokens [batch, beam] -> logits [batch, beam, vocab]; of no nodes those of the last position"""
        (batch, beam), device = tokens.shape, tokens.device
        lines, positions = send(
            device,
            [line for line, span in enumerate(extends) for _ in span],
            [position for span in extends for position in span],
        )
        table, known = self._texts, nodes.num_rows
        place = torch.arange(known - beam, known, device=device).expand(batch, -1)
        depths = nodes.depths[:, known - beam :]
        slots = self._scratch[:batch, :known]
        ends = nodes.roots - 1
        attention = AttentionRows(
            sequence=torch.cat([lines, torch.arange(batch, device=device).repeat_interleave(beam)]),
            positions=torch.cat([positions, (ends[:, None] + depths).flatten()]),
            node=torch.cat([torch.full_like(lines, -1), place.flatten()]),
            table_rows=nodes.rows,
            extend_end=ends,
            node_slots=slots,
            node_depths=nodes.depths,
            ancestors=nodes.ancestors,
        )
        committed = nodes.rows[lines], positions
        wanted = max(1, batch * beam)
        output = self._model.compute(
            torch.cat([table.tokens[committed], tokens.flatten()]),
            attention,
            torch.cat([table.slots[committed], slots[:, known - beam :].flatten()]),
            torch.arange(len(attention.sequence) - wanted, len(attention.sequence), device=device),
            table.slots,
        )
        return output.logits.view(batch, max(1, beam), -1)
