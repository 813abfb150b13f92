"""The draft stage: candidates from the drafter, cut to what can still be emitted, pruned to the budget."""

from collections.abc import Sequence as Items
from dataclasses import replace

import torch
from torch import Tensor

from drafters.protocol import DraftContext, Drafter, Noise
from drafters.select import select
from drafters.tree import Candidates, DraftTree
from service.engine.budget import Budget, BudgetPolicy, Load
from service.engine.generation import Sequence
from service.engine.scheduler import Batch


class DraftStage:
    """Builds one draft tree per sequence of a batch; those that do not draft get a tree of zero nodes."""

    def __init__(self, drafter: Drafter, policy: BudgetPolicy, *, max_budget: int, device: torch.device) -> None:
        self._drafter = drafter
        self._policy = policy
        self._max_budget = max_budget
        self._device = device

    def start(self, sequences: Items[Sequence]) -> None:
        """Tell the drafter of sequences that begin, or begin again, to run."""
        if sequences:
            self._drafter.start(
                [DraftContext(s.table_row, s.tokens, s.request.prediction, s.num_generated) for s in sequences]
            )

    def stop(self, sequence: Sequence) -> None:
        """Tell the drafter of a sequence that no longer runs, and keep count of the prediction that came true."""
        sequence.foretold_tokens += self._drafter.finish([sequence.table_row])[0]

    def build(self, batch: Batch, num_free_slots: int) -> tuple[DraftTree, Budget]:
        """The step's trees, one line per item of the batch, and the decision behind their size."""
        drafting = batch.drafting
        candidates = self._grow(drafting)
        load = Load(
            num_rows=batch.num_chain_rows,
            context=sum(len(s.tokens) for s in drafting) / max(1, len(drafting)),
            max_nodes=num_free_slots - batch.num_chain_rows,
        )
        budget = self._policy.choose(candidates, self._limits(drafting, candidates), load)
        width = int(budget.num_keep.max()) if drafting else 0
        return _pad_lines(select(candidates, budget.num_keep, width), len(batch.items)), budget

    def _grow(self, drafting: Items[Sequence]) -> Candidates:
        if not any(sequence.max_nodes != 0 for sequence in drafting):
            return DraftTree.empty(len(drafting), self._device)
        rows = self._tensor([s.table_row for s in drafting])
        noise = Noise(
            seeds=self._tensor([s.sampling.params.seed for s in drafting]),
            temperatures=torch.tensor([s.sampling.params.temperature for s in drafting], device=self._device),
            positions=self._tensor([len(s.tokens) - 1 for s in drafting]),
        )
        deepest = self._tensor([s.num_remaining - 1 for s in drafting])
        return _cut_below(self._drafter.grow(rows, noise), deepest)

    def _limits(self, drafting: Items[Sequence], candidates: Candidates) -> Tensor:
        """Most nodes of each sequence: by configuration, by its own wish, by what is worth verifying. # -> [batch]"""
        wished = [self._max_budget if s.max_nodes is None else min(s.max_nodes, self._max_budget) for s in drafting]
        return torch.minimum(self._tensor(wished), (candidates.survival > 0).sum(1))

    def _tensor(self, values: Items[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _cut_below(candidates: Candidates, deepest: Tensor) -> Candidates:
    """Give nodes that could not be emitted any more a survival of zero. # deepest [batch]"""
    return replace(candidates, survival=candidates.survival * (candidates.depths <= deepest[:, None]))


def _pad_lines(tree: DraftTree, lines: int) -> DraftTree:
    """Append trees of zero nodes."""
    missing = lines - tree.batch

    def pad(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(missing, *values.shape[1:])])

    return DraftTree(pad(tree.tokens), pad(tree.parents), pad(tree.depths), pad(tree.survival), pad(tree.num_nodes))
