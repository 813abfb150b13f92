"""Drafts with a language model, whose trees grow level by level as a beam search.

At each level, the nodes with the likeliest paths are continued with their likeliest tokens. The tree consists of the
nodes with the highest path probability of all levels. Another level is run only while such forwards pay
(`ForwardGates`).
Legend: batch, rows = sequences of the engine's table, beam = nodes of a level that are continued, nodes = of one level.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.asking import ForwardGates
from drafters.calibration import RankCalibration
from drafters.coupling import TreeNoise
from drafters.language_model.forward import LanguageModel, Sequences, TreeForward
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, HostMetadata, Noise, Read, StepTimes
from drafters.tree import Candidates, DraftTree
from kernels import ops
from kernels.lattice import TOP, Lattice, Picked, StartNodes
from kernels.survival import CEILING
from kernels.tree_attention import MAX_DEPTH

BEAM = 8
"""Maximum number of nodes of a level that are continued."""
DEPTH = 8
"""Maximum number of levels of a tree, with one forward each."""
_ROWS = 1 + (DEPTH - 1) * BEAM  # rows that a tree needs: its root, and all nodes that are continued
_MOST_MISSING = MAX_DEPTH + 1
"""Most missing positions of a sequence that are run in the forward of the roots: as many as one step can commit."""


class _Level(NamedTuple):
    """Proposals of one forward: the children of the nodes that were continued."""

    lattice: Lattice
    picked: Picked  # nodes to continue in the next forward
    predicted: Tensor  # [batch, nodes], conditional probabilities before correction


def scratch_places(max_sequences: int) -> int:
    """Return the number of pool entries that the trees of `max_sequences` sequences need, in addition to the slots."""
    return max_sequences * _ROWS


class LanguageModelDrafter(Drafter):
    """Drafter that runs a language model on the committed tokens and on its own trees."""

    reads_prompts = True

    def __init__(self, name: str, model: LanguageModel, sizes: DraftingSizes) -> None:
        """Raises ValueError if the model's pool has too few entries for the trees of all sequences."""
        self._name = name
        self._table = Sequences(sizes)
        self._forward = TreeForward(model, self._table, nodes=_ROWS)
        if self._forward.num_trees < sizes.max_sequences:
            raise ValueError(
                f"drafter {name}: pool has room for {self._forward.num_trees} trees, {sizes.max_sequences} are needed"
            )
        most = max(1, sizes.max_nodes)
        self._sizes, self._beam, self._depth = sizes, min(BEAM, most), min(DEPTH, most)
        # With the same tokenizer, the vocabularies may still differ in padding.
        self._ids = torch.arange(min(model.vocab_size, sizes.vocab_size), device=sizes.device)
        self._ops = ops.on(self._ids.device)
        self._calibration = RankCalibration(1, sizes)
        self._gates = ForwardGates(self._depth - 1, sizes)
        self._has_grown = False  # whether it drafted since the last commit

    @property
    def name(self) -> str:
        return self._name

    @property
    def needs_roots(self) -> bool:
        return True

    def start(self, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            self._table.start(context)
        self._calibration.forget([context.row for context in contexts])

    @torch.inference_mode()
    def read(self, read: Read) -> None:
        self._table.read(read)
        if read.follow:
            self._follow(HostMetadata((read.row,), (read.start + len(read.slots),)))

    @torch.inference_mode()
    def grow(self, rows: Tensor, noise: Noise) -> Candidates:  # rows [batch]
        self._has_grown = True
        self._gates.begin(len(rows), warm=noise.warm)
        host = noise.host or HostMetadata.of(rows, noise.positions)
        self._follow(host, most=_MOST_MISSING)
        missing = self._table.missing(host)
        for row, root in zip(host.rows, host.roots, strict=True):
            self._table.run(row, root)
        logits, nodes = self._forward.root(rows, noise.positions, missing)
        levels = [self._level(logits, StartNodes.root(len(rows), rows.device), noise, 0)]
        first = 0  # index of the previous level's first row in its tree
        for number in range(1, self._depth):
            picked = levels[-1].picked
            if not self._gates.ask(number - 1, picked.origin.survival):
                break
            above = nodes.num_rows
            logits, nodes = self._forward.deeper(picked.tokens, first + picked.start, nodes)
            first = above
            levels.append(self._level(logits, picked.origin, noise, number))
        return self._tree(rows, levels)

    @torch.inference_mode()
    def commit(self, committed: Committed) -> None:
        self._table.commit(committed)
        known = committed.rows, committed.tokens, committed.counts
        self._gates.end(self._calibration.learn(*known) if self._has_grown else None)
        self._has_grown = False

    def timed(self, times: StepTimes) -> None:
        self._gates.timed(times)

    def finish(self, rows: Sequence[int]) -> list[int]:
        self._calibration.forget(rows)
        return [0] * len(rows)

    def _follow(self, host: HostMetadata, most: int = 0) -> None:
        """Run the missing positions of those sequences that miss more than `most`."""
        for row, span in zip(host.rows, self._table.missing(host), strict=True):
            if len(span) > most:
                self._forward.follow(row, span)
                self._table.run(row, span.stop)

    def _level(self, logits: Tensor, origin: StartNodes, noise: Noise, number: int) -> _Level:
        """Propose children of the nodes of one level. # logits [batch, beam, vocab]"""
        here = TreeNoise.of(replace(noise, positions=noise.positions + number), 1, self._ids)
        known = logits[:, :, None, : len(self._ids)]  # [batch, beam, 1, vocab]
        features, tokens = self._ops.rank_features(here.scores(known, torch.ones_like(origin.depth)[..., None]))
        predicted = features[..., :TOP].exp().clamp(max=CEILING)  # [batch, beam, 1, rank]
        trust, before = self._calibration.trust(number), 0 if number == 0 else TOP * (1 + (number - 1) * self._beam)
        offered = origin, tokens, predicted, trust
        lattice, picked = self._ops.grow_lattice(*offered, before, self._sizes.least_survival, self._beam)
        self._sizes.observer(lattice, known, self._ids)
        return _Level(lattice, picked, predicted.flatten(1))

    def _tree(self, rows: Tensor, levels: Sequence[_Level]) -> DraftTree:
        """Return the likeliest nodes of all levels as trees, and keep them for the calibration. # rows [batch]"""
        parts = zip(*(level.lattice.nodes() for level in levels), strict=True)
        tokens, parents, depths, survival = (torch.cat(part, dim=1) for part in parts)
        raw = DraftTree(tokens, parents, depths, survival, num_nodes=rows)  # `num_nodes` of a raw tree is not read
        tree, chosen = self._ops.likeliest_nodes(raw, self._sizes.max_nodes)
        predicted = torch.cat([level.predicted for level in levels], dim=1)
        buckets = torch.cat(
            [
                self._calibration.buckets(number).flatten().repeat(level.predicted.shape[1] // TOP)
                for number, level in enumerate(levels)
            ]
        )
        self._calibration.keep(rows, tree, chosen, predicted, buckets)
        return tree
