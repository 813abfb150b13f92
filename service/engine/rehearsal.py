"""Forwards on made-up text before serving starts, to check numerics and to measure cost with the engine's own parts."""

import torch
from torch import Tensor

from drafters.tree import DraftTree
from service.engine.commit import lay_out
from service.engine.rows import Chain
from service.engine.slots import SlotPool, SlotTable
from service.engine.target import Target


class Rehearsal:
    """A few lines of text on the target's pool, in scrambled slots; everything is free again when it is dropped."""

    def __init__(self, target: Target, *, lines: int, max_length: int, seed: int = 0) -> None:
        self.target = target
        self.generator = torch.Generator().manual_seed(seed)
        self._table = SlotTable(lines, max_length, target.device)
        self._slots = SlotPool(target.pool.num_slots, target.device)
        self._scramble()

    def random_tokens(self, count: int) -> list[int]:
        tokens: list[int] = torch.randint(self.target.vocab_size, (count,), generator=self.generator).tolist()
        return tokens

    def read(self, line: int, tokens: list[int], *, start: int = 0, chunk: int) -> None:
        """Compute keys and values of `tokens` from position `start` on, in chunks."""
        for first in range(0, len(tokens), chunk):
            self._run([Chain(line, start + first, tokens[first : first + chunk], completes=False)], DraftTree.empty(1))

    def decode(self, line: int, token: int, position: int) -> Tensor:
        """Logits after one more token. # -> [vocab]"""
        return self._run([Chain(line, position, [token], completes=True)], DraftTree.empty(1))[0]

    def verify(self, lines: list[int], roots: list[int], positions: list[int], tree: DraftTree) -> Tensor:
        """Logits after each root and each node of its tree, whose slots are freed again. # -> [rows, vocab]"""
        chains = [
            Chain(line, position, [root], completes=True)
            for line, root, position in zip(lines, roots, positions, strict=True)
        ]
        return self._run(chains, tree, keep_nodes=False)

    def _run(self, chains: list[Chain], tree: DraftTree, *, keep_nodes: bool = True) -> Tensor:
        rows = lay_out(chains, tree, self._slots, self._table)
        logits = self.target.forward(rows, self._table).logits
        if not keep_nodes:
            self._slots.free(rows.slots[rows.attention.node >= 0])
        return logits

    def _scramble(self) -> None:
        everything = self._slots.allocate(self._slots.num_free)
        order = torch.randperm(everything.shape[0], generator=self.generator).to(everything.device)
        self._slots.free(everything[order])
