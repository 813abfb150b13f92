"""The drafters that `adaptree bench drafters` puts behind the budget: the worst there can be, and the best.

A script says what is proposed; the drafter around it is the same for all. Scripts know the vocabulary or the answers,
never the budget they are up against.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from drafters.protocol import Committed, DraftContext, Noise, UntrainedDrafter
from drafters.random_tree import random_depths, random_parents, random_tokens, sibling_ranks
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree


class Script(Protocol):
    """What a scripted drafter proposes."""

    def begin(self, contexts: Sequence[DraftContext]) -> None:
        """Sequences begin, or begin again."""
        ...

    def propose(self, rows: Tensor) -> Candidates:
        """# rows [batch] int64"""
        ...

    def advance(self, committed: Committed) -> None:
        """Texts have gone on."""
        ...


class Lies:
    """Random trees, always as large as allowed, every node of which claims to survive for certain."""

    def __init__(self, seed: int, vocab_size: int, max_nodes: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes

    def begin(self, contexts: Sequence[DraftContext]) -> None:
        """A lie needs no text."""

    def propose(self, rows: Tensor) -> Candidates:
        depths = random_depths(rows.shape[0], self._max_nodes, self._generator)
        parents = random_parents(depths, self._generator)
        ranks, _ = sibling_ranks(parents)
        return DraftTree.of(random_tokens(parents, ranks, self._vocab_size, self._generator), parents)

    def advance(self, committed: Committed) -> None:
        """Nor a fate."""


class Replay:
    """The known answer as a chain, as deep as a tree may be. It arrives as the sequence's `prediction`."""

    def __init__(self, max_nodes: int, *, max_sequences: int, max_length: int, device: torch.device) -> None:
        self._depth = min(max_nodes, MAX_DEPTH)
        self._answers = torch.full((max_sequences, max_length + MAX_DEPTH), -1, device=device)
        self._generated = torch.zeros(max_sequences, dtype=torch.int64, device=device)

    def begin(self, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            answer = torch.tensor(list(context.prediction), dtype=torch.int64, device=self._answers.device)
            self._answers[context.row] = -1
            self._answers[context.row, : answer.shape[0]] = answer
            self._generated[context.row] = context.num_generated

    def propose(self, rows: Tensor) -> Candidates:
        places = torch.arange(self._depth, device=rows.device)  # [depth]
        answers = self._answers[rows].gather(1, self._generated[rows][:, None] + places)  # [batch, depth]
        known = answers >= 0
        return DraftTree(
            tokens=answers * known,
            parents=torch.where(known, places - 1, ROOT),
            depths=(places + 1) * known,
            survival=known.float(),
            num_nodes=known.sum(1),
        )

    def advance(self, committed: Committed) -> None:
        self._generated[committed.rows] += committed.counts


class ScriptedDrafter(UntrainedDrafter):
    """Proposes what its script says. Needs no features and has no weights."""

    def __init__(self, name: str, script: Script) -> None:
        self._name = name
        self._script = script

    @property
    def name(self) -> str:
        return self._name

    def start(self, contexts: Sequence[DraftContext]) -> None:
        self._script.begin(contexts)

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        return self._script.propose(rows)

    def commit(self, committed: Committed) -> None:
        self._script.advance(committed)
