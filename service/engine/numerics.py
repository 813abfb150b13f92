"""Whether a row's result depends on what runs beside it, checked bit for bit on the running machine.

The check runs at start-up, on made-up text; time and memory are measured with the same forwards.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from drafters.tree import ROOT, DraftTree
from service.engine.commit import lay_out
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.rows import ExtendRows, ForwardRows
from service.engine.target import Target

Numerics = Literal["exact", "tolerant"]

_CONTEXT = 150
_STEPS = 12
_BRANCHES = 12
_SHALLOW = 4  # branches hang below the first few nodes, so that no tree grows too deep


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


def check(target: Target) -> Numerics:
    """What this machine and this model allow: where rows depend on their company, text may differ between runs in rare
    near-ties, as it does in other servers."""
    return "exact" if rows_are_independent(target) else "tolerant"


def rows_are_independent(target: Target, *, context: int | None = None, steps: int = _STEPS) -> bool:
    """Compare one-row decoding with trees beside another sequence, after other prompt chunkings: bits must agree.

    `context` is the length of the text; otherwise as long as is worth while and as fits into the pool three times.
    """
    context = context or min(_CONTEXT, (target.pool.num_slots - 1 - steps - 2 * (steps + _BRANCHES)) // 3)
    trial = Trial(target, lines=3, max_length=context + 2 * steps + 2)
    tokens = trial.random_tokens(context + steps)
    trial.read(0, tokens[:context], chunk=context)
    alone = [trial.decode(0, tokens[context + step], context + step) for step in range(steps)]
    for line, chunk in ((1, 7), (2, 33)):
        trial.read(line, tokens[:context], chunk=chunk)
    together = _verified_paths(trial, tokens, context, steps)
    return all(torch.equal(a, b) for pair in together for a, b in zip(alone, pair, strict=True))


def _verified_paths(trial: Trial, tokens: Sequence[int], context: int, steps: int) -> list[list[Tensor]]:
    """Logits along the true text when it is one path among random branches, for two sequences in one forward."""
    path = list(tokens[context + 1 : context + steps])
    trees = [_tree_around(path, trial), _tree_around(path, trial)]
    tree = DraftTree.concatenated([t for t, _ in trees])
    roots = [ExtendRows(line, context, [tokens[context]], completes=True) for line in (1, 2)]
    logits = trial.verify(roots, tree)
    return [[part[0], *part[1 + places]] for part, (_, places) in zip(logits, trees, strict=True)]


def _tree_around(path: Sequence[int], trial: Trial) -> tuple[DraftTree, Tensor]:
    """A tree that holds `path` and random branches in random order, parents first; and the path's node indices."""
    generator, nodes = trial.generator, len(path) + _BRANCHES
    places = torch.randperm(nodes, generator=generator)[: len(path)].sort().values
    tokens = torch.tensor(trial.random_tokens(nodes))
    tokens[places] = torch.tensor(path)
    earlier = torch.arange(nodes).clamp(max=_SHALLOW) + 1
    parents = (torch.rand(nodes, generator=generator) * earlier).long() + ROOT
    parents[places] = torch.cat([torch.tensor([ROOT]), places[:-1]])
    device = trial.target.device
    return DraftTree.of(tokens[None], parents[None]).to(device), places.to(device)
