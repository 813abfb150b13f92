"""Forwards on made-up text before serving starts: to check numerics, and to measure time and memory."""

import torch
from torch import Tensor

from drafters.tree import DraftTree
from service.engine.commit import lay_out
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.rows import ExtendRows, ForwardRows
from service.engine.target import Target


class Trial:
    """A few lines of text on the target's pool, in scrambled slots; everything is free again when it is dropped."""

    def __init__(self, target: Target, *, lines: int, max_length: int) -> None:
        self.target = target
        self.generator = torch.Generator().manual_seed(0)
        self.table = SlotTable(lines, max_length, target.device)
        self._slots = SlotPool(target.pool.num_slots, target.device)
        everything = self._slots.allocate(self._slots.num_free)
        order = torch.randperm(everything.shape[0], generator=self.generator).to(everything.device)
        self._slots.free(everything[order])

    def random_tokens(self, count: int) -> list[int]:
        tokens: list[int] = torch.randint(self.target.vocab_size, (count,), generator=self.generator).tolist()
        return tokens

    def place(self, extends: list[ExtendRows], tree: DraftTree | None = None) -> ForwardRows:
        """The rows of a forward, in slots of their own."""
        return lay_out(extends, tree or DraftTree.empty(len(extends), self.target.device), self._slots, self.table)

    def free(self, rows: ForwardRows) -> None:
        self._slots.free(rows.slots)

    def run(self, extends: list[ExtendRows], tree: DraftTree | None = None) -> tuple[ForwardRows, Tensor]:
        """Compute the rows' keys and values. # -> rows, logits [logits, vocab]"""
        rows = self.place(extends, tree)
        return rows, self.target.forward(rows, self.table).logits

    def read(self, line: int, tokens: list[int], *, chunk: int) -> None:
        """Compute keys and values of a text from its beginning, in chunks."""
        for first in range(0, len(tokens), chunk):
            self.run([ExtendRows(line, first, tokens[first : first + chunk], completes=False)])

    def decode(self, line: int, token: int, position: int) -> Tensor:
        """Logits after one more token, a copy. # -> [vocab]"""
        return self.run([ExtendRows(line, position, [token], completes=True)])[1][0].clone()

    def verify(self, roots: list[ExtendRows], tree: DraftTree) -> Tensor:
        """Logits after each root and each node of its tree; their slots are free again afterwards.

        -> [batch, nodes + 1, vocab]
        """
        rows, logits = self.run(roots, tree)
        self.free(rows)
        placed = logits.new_zeros(tree.batch, tree.width + 1, logits.shape[1])
        placed[rows.logit_sequence, rows.attention.node[rows.logit_rows] + 1] = logits
        return placed
