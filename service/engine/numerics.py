"""The self-check at start-up: whether a row's result depends on the other rows of its forward, bit for bit.

It runs on random tokens; time and memory are measured with the same forwards.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from drafters.tree import ROOT, DraftTree
from kernels.rows import ExtendRows, ForwardRows
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.rows import RowLayout
from service.engine.target import Target

Numerics = Literal["exact", "tolerant"]

_CONTEXT = 150
_STEPS = 12
_BRANCHES = 12
_SHALLOW = 4  # branches grow below the first few nodes, so that no tree gets too deep


class Trial:
    """A few sequences on the target's pool, in shuffled slots, for forwards outside of serving."""

    def __init__(self, target: Target, *, sequences: int, max_length: int) -> None:
        self.target = target
        self.generator = torch.Generator().manual_seed(0)
        self.table = SlotTable(sequences, max_length, target.device)
        self._slots = SlotPool(target.pool.num_slots, target.device)
        everything = self._slots.allocate(self._slots.num_free)
        order = torch.randperm(everything.shape[0], generator=self.generator).to(everything.device)
        self._slots.free(everything[order])
        self._layout = RowLayout(self._slots, self.table)

    def random_tokens(self, count: int) -> list[int]:
        """The next `count` tokens of a seeded generator."""
        tokens: list[int] = torch.randint(self.target.vocab_size, (count,), generator=self.generator).tolist()
        return tokens

    def place(self, extends: list[ExtendRows], tree: DraftTree | None = None) -> ForwardRows:
        """Lay out a forward's rows in free slots."""
        return self._layout(extends, tree or DraftTree.empty(len(extends), self.target.device))

    def free(self, rows: ForwardRows) -> None:
        """Free the slots of all rows."""
        self._slots.free(rows.slots)

    def run(self, extends: list[ExtendRows], tree: DraftTree | None = None) -> tuple[ForwardRows, Tensor]:
        """Run a forward. # -> rows, logits [logits, vocab]"""
        rows = self.place(extends, tree)
        return rows, self.target.forward(rows, self.table).logits

    def prefill(self, row: int, tokens: list[int], *, chunk: int) -> None:
        """Compute keys and values of a prompt in chunks; `row` of the slot table."""
        for first in range(0, len(tokens), chunk):
            self.run([ExtendRows(row, first, tokens[first : first + chunk], completes=False)])

    def decode(self, row: int, token: int, position: int) -> Tensor:
        """Run one token of a sequence and return the logits after it, copied. # -> [vocab]"""
        return self.run([ExtendRows(row, position, [token], completes=True)])[1][0].clone()

    def verify(self, roots: list[ExtendRows], tree: DraftTree) -> Tensor:
        """Logits after each root and each node of its tree; frees their slots. # -> [batch, nodes + 1, vocab]"""
        rows, logits = self.run(roots, tree)
        self.free(rows)
        placed = logits.new_zeros(tree.batch, tree.width + 1, logits.shape[1])
        placed[rows.logit_sequence, rows.attention.node[rows.logit_rows] + 1] = logits
        return placed


def check(target: Target) -> Numerics:
    """Run the self-check. "tolerant": rows depend on the other rows of their forward, so text may differ between runs
    in rare near-ties, as it does in other servers."""
    return "exact" if rows_are_independent(target) else "tolerant"


def rows_are_independent(target: Target, *, context: int | None = None, steps: int = _STEPS) -> bool:
    """Compare plain decoding with trees of two sequences in one forward, after other prompt chunkings, bit by bit.

    `context` is the prompt's length; by default as long as is useful and fits into the pool three times.
    """
    context = context or min(_CONTEXT, (target.pool.num_slots - 1 - steps - 2 * (steps + _BRANCHES)) // 3)
    trial = Trial(target, sequences=3, max_length=context + 2 * steps + 2)
    tokens = trial.random_tokens(context + steps)
    trial.prefill(0, tokens[:context], chunk=context)
    alone = [trial.decode(0, tokens[context + step], context + step) for step in range(steps)]
    for row, chunk in ((1, 7), (2, 33)):
        trial.prefill(row, tokens[:context], chunk=chunk)
    together = _verified_paths(trial, tokens, context, steps)
    return all(torch.equal(a, b) for pair in together for a, b in zip(alone, pair, strict=True))


def _verified_paths(trial: Trial, tokens: Sequence[int], context: int, steps: int) -> list[list[Tensor]]:
    """Logits along the tokens that follow, as one path among random branches, for two sequences in one forward."""
    path = list(tokens[context + 1 : context + steps])
    trees = [_tree_around(path, trial), _tree_around(path, trial)]
    tree = DraftTree.concatenated([t for t, _ in trees])
    roots = [ExtendRows(row, context, [tokens[context]], completes=True) for row in (1, 2)]
    logits = trial.verify(roots, tree)
    return [[part[0], *part[1 + places]] for part, (_, places) in zip(logits, trees, strict=True)]


def _tree_around(path: Sequence[int], trial: Trial) -> tuple[DraftTree, Tensor]:
    """A tree of `path` and random branches in random order, parents first; and the path's nodes. # -> tree, [path]
    int64"""
    generator, nodes = trial.generator, len(path) + _BRANCHES
    places = torch.randperm(nodes, generator=generator)[: len(path)].sort().values
    tokens = torch.tensor(trial.random_tokens(nodes))
    tokens[places] = torch.tensor(path)
    earlier = torch.arange(nodes).clamp(max=_SHALLOW) + 1
    parents = (torch.rand(nodes, generator=generator) * earlier).long() + ROOT
    parents[places] = torch.cat([torch.tensor([ROOT]), places[:-1]])
    device = trial.target.device
    return DraftTree.of(tokens[None], parents[None]).to(device), places.to(device)
