"""The draft stage of a step: which sequences draft, candidates from the drafter, limited to what can still be emitted,
corrected by what became of earlier ones, pruned to the budget; and what drafter, calibration and policy learn from it.

Legend: decoding = sequences that may have a tree, sequences = all sequences of the step, nodes as in drafters/tree.py.
"""

import time
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.calibration import SurvivalCalibration
from drafters.protocol import Committed, DraftContext, Drafter, HostMetadata, Noise, StepTimes
from drafters.tree import ROOT, Candidates, DraftTree
from kernels.graph_runner import Capture
from kernels.staging import send_floats, send_lines
from service.engine.budget import BudgetPolicy, DraftBudget, StepLoad, pace_weights
from service.engine.grammar import constrained, with_runs_of
from service.engine.scheduler import StepBatch
from service.engine.sequence import Sequence
from service.engine.stats import StepStats
from service.engine.tree_pruning import TreePruning, TreeWidth

_REPORT_EVERY = 64
"""Steps between two readings of the calibration error, for which the host waits for the device."""


class DraftStage:
    """Builds one draft tree per sequence of a batch; sequences that do not draft get a tree of zero nodes."""

    def __init__(
        self,
        drafter: Drafter,
        policy: BudgetPolicy,
        *,
        max_budget: int,
        device: torch.device,
        pace_seconds: float | None = None,
        capture: Capture | None = None,
        max_sequences: int = 0,
    ) -> None:
        """With `capture` the trees of up to `max_sequences` are pruned by CUDA graphs, in fixed widths."""
        self.policy = policy
        self._drafter = drafter
        self._pace_seconds = pace_seconds
        self._max_budget = max_budget
        self._device = device
        captured = capture if max_budget else None
        self._pruning = TreePruning(
            SurvivalCalibration(device),
            capture=captured,
            max_batch=max_sequences,
            width=TreeWidth(max_budget, device, captured=captured is not None),
            is_priced=policy.is_priced,
            device=device,
        )
        self._version = drafter.version
        self._num_learnt = 0
        self._num_blocks = drafter.num_blocks
        self._no_trees = cache(partial(DraftTree.empty, device=device))  # read only
        self._even_weights = cache(partial(torch.ones, device=device))

    def start(self, sequences: Items[Sequence]) -> None:
        """Give the drafter the context of sequences that start, or start again after preemption."""
        if sequences:
            self._drafter.start(
                [
                    DraftContext(
                        row=s.table_row,
                        tokens=s.tokens,
                        prediction=s.request.prediction,
                        num_generated=s.num_generated,
                        cached=None if s.lease is None else s.lease.slots,
                        store=s.request.store,
                        scope=s.request.scope.past(shown=s.request.speculation.trace),
                        warm=s.request.sampling.temperature > 0,
                    )
                    for s in sequences
                ]
            )

    def stop(self, sequence: Sequence) -> None:
        """Drop the drafter's state of a sequence that stops running; count the tokens its prediction had right."""
        sequence.predicted_tokens += self._drafter.finish([sequence.table_row])[0]

    def arrange(self, batch: StepBatch) -> StepBatch:
        """Sort the batch: sequences that run the drafter first, then other decoding ones, then prompts."""
        selected = self.policy.select([item.sequence.gain for item in batch.items], starts=bool(batch.started))
        drafting = {
            item.sequence
            for item, drafts in zip(batch.items, selected, strict=True)
            if drafts and item.sequence.max_nodes != 0
        }
        items = sorted(batch.items, key=lambda item: (not item.decodes, item.sequence not in drafting))
        return StepBatch(items, batch.started, len(drafting.intersection(batch.decoding)), follows=bool(drafting))

    def draft(self, batch: StepBatch, num_free_slots: int, *, drafts: bool = True) -> tuple[DraftTree, DraftBudget]:
        """The step's trees, one per sequence, and why they are as large; without `drafts` all are empty."""
        self._notice_new_version()
        load = self._load(batch, num_free_slots)
        refusal = self._refusal(batch, load, drafts=drafts)
        if refusal is None:
            limits = self._limits(batch.decoding, load)
            candidates = self._with_known_tokens(batch.decoding, self._grow(batch.decoding, load, limits))
            return self._pruned(batch, load, candidates, limits, "cost" if self.policy.is_priced else "fixed")
        if refusal == "suspended" and any(s.sampling.grammar or s.replay_tokens for s in batch.decoding):
            candidates = self._with_known_tokens(batch.decoding, self._no_trees(load.num_decoding))
            if candidates.width:
                return self._pruned(batch, load, candidates, self._limits(batch.decoding, load), "forced")
        none = (0,) * len(batch.items)
        budget = DraftBudget(
            load=load, reason=refusal, node_rows=none, drafted=False, followed=batch.follows, num_nodes=none
        )
        return self._no_trees(len(batch.items)), budget

    def with_node_counts(self, budget: DraftBudget, tree_sizes: Items[Items[int]]) -> DraftBudget:
        """Complete the budget once the host has read the trees' sizes, and choose the next step's width by them.
        # tree_sizes [completing, SIZES] as of the budget's"""
        if budget.tree_sizes is None:
            return budget
        wanted, nodes, useful = zip(*tree_sizes[: budget.load.num_decoding], strict=True)
        self._pruning.width.learn(wanted)
        reason = budget.reason
        if reason == "cost" and not any(nodes):
            reason = "does_not_pay" if any(useful) else "no_candidates"
        nodes += (0,) * (len(budget.node_rows) - len(nodes))
        return replace(budget, reason=reason, num_nodes=nodes)

    def learn(self, budget: DraftBudget, committed: Committed, stats: StepStats, *, timed: bool = True) -> None:
        """Let calibration, drafter and policy learn from the step, and complete its record with their figures.

        `timed`: whether the step's seconds are those of serving alone. Of the committed sequences the decoding ones
        stand first.
        """
        load = budget.load
        if committed.tree.width:
            self._pruning.learn(committed.tokens[: load.num_decoding], committed.counts[: load.num_decoding])
        if timed:
            reads_prompts = load.num_rows != load.num_decoding
            self._drafter.timed(StepTimes(stats.seconds, stats.follow_seconds, reads_prompts=reads_prompts))
            stats.predicted_verify_seconds = self.policy.learn(budget, stats)
        stats.drafting = self.policy.outlook(load)
        stats.drafted_blocks, self._num_blocks = self._drafter.num_blocks - self._num_blocks, self._drafter.num_blocks
        stats.memory = self._drafter.memory_counts()
        self._num_learnt += 1
        if self._num_learnt % _REPORT_EVERY == 0:
            stats.survival_error = self._pruning.calibration.error()
            ranks = self._drafter.rank_outcomes()
            stats.rank_predicted, stats.rank_right = ranks.predicted, ranks.right

    def _load(self, batch: StepBatch, num_free_slots: int) -> StepLoad:
        pace, num_rows = self._pace_seconds, batch.num_extend_rows
        ends = sum(item.start + item.num_rows for item in batch.items)
        return StepLoad(
            num_rows=num_rows,
            context=ends / max(1, len(batch.items)),
            free_slots=num_free_slots - num_rows,
            num_sequences=len(batch.items),
            decoding=tuple(s.gain for s in batch.decoding),
            num_drafting=len(batch.decoding) if batch.num_drafting is None else batch.num_drafting,
            prefilling=tuple(item.sequence.gain for item in batch.items if not item.decodes),
            weights=None if pace is None else pace_weights(batch.decoding, pace, time.monotonic(), self._device),
            tree_widths=self._pruning.width.choices,
        )

    def _refusal(self, batch: StepBatch, load: StepLoad, *, drafts: bool) -> str | None:
        """Why the drafter does not run, None where it does."""
        if not drafts or all(sequence.max_nodes == 0 for sequence in batch.decoding):
            return "no_candidates"
        return self.policy.refusal(load) if load.has_room else "slots"

    def _pruned(
        self, batch: StepBatch, load: StepLoad, candidates: Candidates, limits: "_Limits", reason: str
    ) -> tuple[DraftTree, DraftBudget]:
        """Prune candidates to the budget, at equal shares of the free slots where they would not fit."""
        trees, tree_sizes, node_rows = self._prune(candidates, load, limits.max_depth, limits.max_nodes)
        if sum(node_rows) > load.free_slots:  # prices account for the slots, fixed budgets do not
            max_nodes = limits.max_nodes.clamp(max=load.free_slots // load.num_decoding)
            trees, tree_sizes, node_rows = self._prune(candidates, load, limits.max_depth, max_nodes)
            reason = reason if reason == "forced" else "slots"
        num_sequences, drafted = len(batch.items), reason != "forced"
        budget = DraftBudget(
            load=load,
            reason=reason,
            node_rows=(*node_rows, *(0 for _ in range(num_sequences - len(node_rows)))),
            drafted=drafted,
            followed=drafted or batch.follows,
            tree_sizes=tree_sizes,
        )
        return _with_empty_trees(trees, num_sequences), budget

    def _prune(
        self, candidates: Candidates, load: StepLoad, max_depth: Tensor, max_nodes: Tensor
    ) -> tuple[DraftTree, Tensor, list[int]]:
        """Trees, their sizes as of `Pruned`, and the rows laid out for each."""
        seconds = send_floats(self._device, self.policy.step_seconds(load, candidates.tokens.numel()))
        weights = self._even_weights(candidates.batch) if load.weights is None else load.weights
        width = self._pruning.width.choose(candidates, load.free_slots)
        trees, tree_sizes = self._pruning.prune(candidates, max_depth, max_nodes, seconds, weights, width)
        node_rows = self._pruning.width.node_rows(tree_sizes, width)
        return trees.first(candidates.batch, max(node_rows, default=0)), tree_sizes, node_rows

    def _limits(self, decoding: Items[Sequence], load: StepLoad) -> "_Limits":
        most = min(self._max_budget, self.policy.max_nodes(load))
        rows, roots, seeds, max_depth, max_nodes = send_lines(
            self._device,
            [s.table_row for s in decoding],
            [len(s.tokens) - 1 for s in decoding],
            [s.sampling.params.seed for s in decoding],
            [s.num_remaining - 1 for s in decoding],
            [most if s.max_nodes is None else min(s.max_nodes, most) for s in decoding],
        )
        temperatures = send_floats(self._device, [s.sampling.params.temperature for s in decoding])
        return _Limits(rows, roots, seeds, max_depth, max_nodes, temperatures)

    def _grow(self, decoding: Items[Sequence], load: StepLoad, limits: "_Limits") -> Candidates:
        """Candidates of the sequences that run the drafter, and empty trees for the others. # [decoding, nodes]"""
        drafting, count = decoding[: load.num_drafting], load.num_drafting
        noise = Noise(
            seeds=limits.seeds[:count],
            temperatures=limits.temperatures[:count],
            positions=limits.roots[:count],
            warm=any(s.sampling.params.temperature for s in drafting),
            host=HostMetadata(tuple(s.table_row for s in drafting), tuple(len(s.tokens) - 1 for s in drafting)),
        )
        return _with_empty_trees(self._drafter.grow(limits.rows[:count], noise), len(decoding))

    def _with_known_tokens(self, decoding: Items[Sequence], candidates: Candidates) -> Candidates:
        """Add tokens that resumed streams replay and those that grammars force; drop what grammars forbid."""
        replayed, grammars = [s.replay_tokens for s in decoding], [s.sampling.grammar for s in decoding]
        if any(replayed):
            candidates = with_runs_of(candidates, replayed, self._max_budget)
        return constrained(candidates, grammars, self._max_budget) if any(grammars) else candidates

    def _notice_new_version(self) -> None:
        if self._version != self._drafter.version:
            self._version = self._drafter.version
            self._drafter.on_weights_changed()
            self._pruning.calibration.on_weights_changed()
            self.policy.on_weights_changed()


class _Limits(NamedTuple):
    """Per decoding sequence, on the device: what the drafter reads, and how large a tree may be. All [decoding]."""

    rows: Tensor  # int64, as all but temperatures
    roots: Tensor  # absolute positions
    seeds: Tensor
    max_depth: Tensor  # tokens after the root that can still be emitted
    max_nodes: Tensor  # by configuration, policy and request
    temperatures: Tensor  # float32


def _with_empty_trees(trees: DraftTree, num_sequences: int) -> DraftTree:
    """Append trees of zero nodes, up to one per sequence."""
    missing = num_sequences - trees.batch
    if not missing:
        return trees
    empty = DraftTree(*(values.new_zeros(missing, *values.shape[1:]) for values in trees))
    return DraftTree.concatenated([trees, empty._replace(parents=empty.parents + ROOT)])
