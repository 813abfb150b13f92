"""Forwards of a drafting language model, over committed positions that it has not run and over draft trees level by
level, and its tables of running sequences.

For attention, the root of a tree counts as its first node, because the root's slot is only known after the target has
run it.
Legend: rows = sequences of the engine's table, batch = drafting sequences, beam = nodes of a level that are continued,
nodes = of all levels so far."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.protocol import Committed, DraftContext, DraftingSizes, HostMetadata, Read
from drafters.slots import HeldSlots, taken_slots
from kernels.graph_runner import send
from kernels.tree_attention import AttentionRows

_AT_ONCE = 256
"""Most positions of one sequence in a forward: the default number of prompt tokens per step."""


class Output(Protocol):
    """Result of a forward of a `LanguageModel`."""

    @property
    def logits(self) -> Tensor:
        """Logits of the requested rows. # [logits, vocab]"""


class LanguageModel(Protocol):
    """A causal language model with a KV pool of its own, addressed by the target's slot ids, with further entries for
    nodes of draft trees. The code that loads models implements it."""

    vocab_size: int

    @property
    def scratch(self) -> Tensor:
        """Pool indices of the entries for tree nodes. # [entries] int64"""

    def compute(
        self, tokens: Tensor, attention: AttentionRows, slots: Tensor, logit_rows: Tensor, slot_table: Tensor
    ) -> Output:
        """Run rows: write their keys and values to `slots`, and return the logits of `logit_rows`. # tokens, slots
        [rows] int64; logit_rows [logits] int64; slot_table [table rows, positions] int64"""


class Sequences:
    """The running sequences: their tokens, the target's slots of all positions before the last, how far the model was
    run on each, and which slots hold positions that it was run on, for new sequences with a cached prefix. `tokens`,
    `slots` [rows, positions + 1] int64; the last column is for padding."""

    def __init__(self, sizes: DraftingSizes) -> None:
        shape = sizes.max_sequences, sizes.max_length + 2
        self.tokens, self.slots = (torch.zeros(shape, dtype=torch.int64, device=sizes.device) for _ in range(2))
        self._held = HeldSlots(sizes.num_slots, sizes.device)
        self._until = [0] * sizes.max_sequences

    def start(self, context: DraftContext) -> None:
        """Start a sequence. The part of its cached prefix that was run already is not run again; `read` and `commit`
        add the slots of positions that are not cached."""
        tokens = torch.tensor(list(context.tokens), dtype=torch.int64)
        self.tokens[context.row, : len(tokens)] = tokens.to(self.tokens.device)
        self._until[context.row] = 0
        if context.cached is not None:
            self.slots[context.row, : len(context.cached)] = context.cached
            held = self._held.holds(context.cached).long().cumprod(0).sum()
            self._until[context.row] = int(held.item())  # planned transfer: once per sequence with a cached prefix

    def read(self, read: Read) -> None:
        """Store the slots of a chunk of a prompt."""
        self.slots[read.row, read.start : read.start + len(read.slots)] = read.slots
        self._held.forget(read.slots)

    def commit(self, committed: Committed) -> None:
        """Append committed tokens, and the slots of the positions that precede them."""
        width = committed.tokens.shape[1]
        offsets = torch.arange(width, device=committed.rows.device)
        valid, rows = offsets < committed.counts[:, None], committed.rows[:, None]
        columns, padding = committed.positions[:, None] + offsets, self.tokens.shape[1] - 1
        self.slots[rows, columns.where(valid, padding)] = committed.slots
        self.tokens[rows, (columns + 1).where(valid, padding)] = committed.tokens
        self._held.forget(taken_slots(committed.slots, committed.counts))

    def missing(self, host: HostMetadata) -> list[range]:
        """Return for each sequence the positions before its root on which the model was not run."""
        return [range(self._until[row], root) for row, root in zip(host.rows, host.roots, strict=True)]

    def run(self, row: int, until: int) -> None:
        """Mark a row's positions before `until` as run."""
        self._held.hold(self.slots[row, self._until[row] : until])
        self._until[row] = until


class LevelNodes(NamedTuple):
    """The nodes of each sequence's tree that were run so far, the root first."""

    rows: Tensor  # [batch] int64, in `Sequences`
    roots: Tensor  # [batch] int64, absolute positions
    depths: Tensor  # [batch, nodes] int64, 1 for the root
    ancestors: Tensor  # [batch, nodes, nodes] bool, the node itself included

    @property
    def num_rows(self) -> int:
        """Number of rows of each tree."""
        return self.depths.shape[1]


class TreeForward:
    """Runs a model on committed positions of sequences and on their draft trees."""

    def __init__(self, model: LanguageModel, table: Sequences, *, nodes: int) -> None:
        """`nodes`: maximum number of rows of a tree."""
        self._model, self._table = model, table
        self._scratch = model.scratch[: len(model.scratch) // nodes * nodes].view(-1, nodes)  # [trees, nodes]

    @property
    def num_trees(self) -> int:
        """Maximum number of trees that fit into the pool's entries for tree nodes."""
        return self._scratch.shape[0]

    def follow(self, row: int, positions: range) -> None:
        """Run a range of positions of a sequence."""
        device = self._table.slots.device
        table_rows = torch.tensor([row], device=device)
        for start in range(positions.start, positions.stop, _AT_ONCE):
            span = range(start, min(start + _AT_ONCE, positions.stop))
            end = torch.tensor([span.stop - 1], device=device)
            none = end.new_zeros(1, 0)
            self._run([span], LevelNodes(table_rows, end + 1, none, none[..., None].bool()), none)

    def root(self, rows: Tensor, roots: Tensor, missing: Sequence[range]) -> tuple[Tensor, LevelNodes]:
        """Run the missing positions of each sequence and, in the same forward, the roots of their trees. # rows, roots
        [batch] int64 -> logits [batch, 1, vocab]"""
        depths = torch.ones_like(rows)[:, None]
        nodes = LevelNodes(rows, roots, depths, depths[..., None].bool())
        return self._run(missing, nodes, self._table.tokens[rows, roots][:, None]), nodes

    def deeper(self, tokens: Tensor, parents: Tensor, nodes: LevelNodes) -> tuple[Tensor, LevelNodes]:
        """Run the next level: a node with each of these tokens. # tokens, parents [batch, beam] int64, parents as rows
        of their tree -> logits [batch, beam, vocab]"""
        beam, known = tokens.shape[1], nodes.num_rows
        above = nodes.ancestors.gather(1, parents[:, :, None].expand(-1, -1, known))
        own = torch.eye(beam, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        grown = nodes._replace(
            depths=torch.cat([nodes.depths, nodes.depths.gather(1, parents) + 1], dim=1),
            ancestors=torch.cat([pad(nodes.ancestors, (0, beam)), torch.cat([above, own], dim=2)], dim=1),
        )
        return self._run((), grown, tokens), grown

    def _run(self, extends: Sequence[range], nodes: LevelNodes, tokens: Tensor) -> Tensor:
        """Run a range of positions of each sequence and the last nodes of their trees, with these tokens.
        # tokens [batch, beam] -> logits [batch, beam, vocab]; without nodes [1, 1, vocab], of the last position run"""
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
