"""The draft stage of a step: candidates from the drafter, with survival corrected by the outcome of earlier drafts, are
pruned to the budget and to what can still be emitted. After the step, drafter, calibration and policy learn from it.

Legend: decoding = sequences that may have a tree, sequences = all sequences of the step, nodes as in drafters/tree.py.
"""

import time
from collections.abc import Sequence as Items
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.calibration import SurvivalCalibration
from drafters.protocol import Committed, DraftContext, Drafter, HostMetadata, Noise, StepTimes
from drafters.tree import ROOT, Candidates, DraftTree
from kernels.graph_runner import Capture, send_floats, send_lines
from kernels.rows import Ahead
from service.engine.budget import Budget, DraftBudget, StepLoad
from service.engine.grammar import constrained, with_runs_of
from service.engine.kv_pool import SlotTable
from service.engine.sampling import filters_of
from service.engine.scheduler import StepBatch
from service.engine.sequence import Sequence
from service.engine.stats import StepStats
from service.engine.tree_pruning import TreePruning, TreeWidth

_MOST_URGENT = 4.0  # maximum weight of a late sequence's tokens
_OUTLOOK_EVERY = 16  # steps between two outlooks, which metrics show until the next
_REPORT_EVERY = 64
"""Number of steps between two readings of the calibration error, for which the host waits for the device."""


class DraftStage:
    """Builds one draft tree per sequence of a batch; sequences that do not draft get a tree of zero nodes."""

    def __init__(
        self,
        drafter: Drafter,
        policy: Budget,
        *,
        max_budget: int,
        device: torch.device,
        pace_seconds: float | None = None,
        capture: Capture | None = None,
        max_sequences: int = 0,
    ) -> None:
        """`pace_seconds`: promised seconds per token, see `pace_weights`; with `capture`, the trees of up to
        `max_sequences` sequences are pruned by CUDA graphs, in fixed widths."""
        self.policy, self.drafter = policy, drafter
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
        self._no_trees = cache(partial(DraftTree.empty, device=device))  # shared, so never written to
        self._even_weights = cache(partial(torch.ones, device=device))

    def start(self, sequences: Items[Sequence], table: SlotTable | None = None) -> None:
        """Give the drafter the context of sequences that start, or start again after preemption; `table` holds their
        slots."""
        if sequences:
            self.drafter.start(
                [
                    DraftContext(
                        row=s.table_row,
                        tokens=s.tokens,
                        prediction=s.request.prediction,
                        num_generated=s.num_generated,
                        cached=None if s.lease is None else s.lease.slots,
                        slots=None if table is None else table.slots[s.table_row],
                        store=s.request.store,
                        scope=s.request.scope.past(shown=s.request.speculation.trace),
                        warm=s.request.sampling.temperature > 0,
                    )
                    for s in sequences
                ]
            )

    def stop(self, sequence: Sequence) -> None:
        """Drop the drafter's state of a sequence that stops running, and add the accepted tokens of its prediction to
        `predicted_tokens`."""
        sequence.predicted_tokens += self.drafter.finish([sequence.table_row])[0]

    def arrange(self, batch: StepBatch, num_free_slots: int) -> StepBatch:
        """Decide the step's budget, and sort the batch: sequences that run the drafter, then other decoding sequences,
        then prompts."""
        self._notice_new_version()
        budget = self.policy.decide(self._load(batch, num_free_slots), starts=bool(batch.started))
        drafting = set(budget.load.drafting)
        items = sorted(batch.items, key=lambda item: (not item.decodes, item.sequence.gain not in drafting))
        return StepBatch(items, batch.started, budget)

    def draft(
        self, batch: StepBatch, ahead: Ahead | None = None, *, drafts: bool = True
    ) -> tuple[DraftTree, DraftBudget]:
        """Draft one tree per sequence. Returns the trees and the step's budget. All trees are empty if `drafts` is
        False or the batch has no budget. `ahead`: newest tokens that only the device knows."""
        budget = batch.budget
        if budget is None or not drafts:
            load = self._load(batch, 0) if budget is None else budget.load
            followed = budget is None or budget.followed
            budget = DraftBudget(load=load, reason="no_candidates", drafted=False, followed=followed)
        if budget.drafted:
            limits = self._limits(batch.decoding, budget.max_nodes, ahead)
            most = 0 if ahead is None else ahead.most
            grown = self._grow(batch.decoding, budget.load, limits, most)
            candidates = self._with_known_tokens(batch.decoding, grown)
            return self._pruned(budget, candidates, limits), budget
        if budget.reason in ("suspended", "does_not_pay") and any(
            s.sampling.grammar or s.request.replayed for s in batch.decoding
        ):
            candidates = self._with_known_tokens(batch.decoding, self._no_trees(budget.load.num_decoding))
            if candidates.width:
                budget.reason = "forced"
                return self._pruned(budget, candidates, self._limits(batch.decoding, budget.max_nodes, ahead)), budget
        budget.node_rows = budget.num_nodes = (0,) * len(batch.items)
        return self._no_trees(len(batch.items)), budget

    def count_nodes(self, budget: DraftBudget, tree_sizes: Items[Items[int]]) -> None:
        """Add the numbers of verified nodes to the budget, after the host has read them, and set the next step's tree
        width by them. # tree_sizes [completing, SIZES], see `Pruned`"""
        if budget.tree_sizes is None:
            return
        wanted, nodes, useful = zip(*tree_sizes[: budget.load.num_decoding], strict=True)
        self._pruning.width.learn(wanted)
        if budget.reason == "cost" and not any(nodes):
            budget.reason = "does_not_pay" if any(useful) else "no_candidates"
        budget.num_nodes = (*nodes, *(0,) * (len(budget.node_rows) - len(nodes)))

    def observe(self, committed: Committed, budget: DraftBudget) -> None:
        """Let the calibration of survival learn from the last trees. In `committed` the decoding sequences come
        first."""
        count = budget.load.num_decoding
        if committed.tree.width:
            self._pruning.learn(committed.tokens[:count], committed.counts[:count])

    def learn(self, budget: DraftBudget, stats: StepStats, *, timed: bool = True, is_passed: bool = False) -> None:
        """Let drafter and policy learn from the step, and add their figures and the calibration's to its record.
        `timed`: whether the step's seconds can be learnt from, because no training ran at the same time; `is_passed`:
        whether another step has been committed since."""
        load = budget.load
        if timed:
            reads_prompts = load.num_rows != load.num_decoding
            times = StepTimes(stats.seconds, stats.follow_seconds, reads_prompts=reads_prompts, is_passed=is_passed)
            self.drafter.timed(times)
            stats.predicted_verify_seconds = self.policy.learn(budget, stats)
        if self._num_learnt % _OUTLOOK_EVERY == 0:
            stats.drafting = self.policy.outlook(load)
        stats.drafted_blocks, self._num_blocks = self.drafter.num_blocks - self._num_blocks, self.drafter.num_blocks
        stats.memory = self.drafter.memory_counts()
        self._num_learnt += 1
        if self._num_learnt % _REPORT_EVERY == 0:
            stats.survival_error = self._pruning.calibration.error()
            ranks = self.drafter.rank_outcomes()
            stats.rank_predicted, stats.rank_right = ranks.predicted, ranks.right

    def _load(self, batch: StepBatch, num_free_slots: int) -> StepLoad:
        ends = sum(item.start + item.num_rows for item in batch.items)
        widths = self._pruning.width.choices
        prompts = (item for item in batch.items if not item.decodes and not item.sequence.request.scores_prompt)
        return StepLoad(
            num_rows=batch.num_extend_rows,
            context=ends / max(1, len(batch.items)),
            free_slots=num_free_slots - batch.num_extend_rows,
            num_sequences=len(batch.items),
            decoding=tuple(s.gain for s in batch.decoding),
            prefilling=tuple(item.sequence.gain for item in batch.items if not item.decodes),
            # Captured forwards compute the scores of all rows.
            num_unscored=0 if widths else sum(item.num_rows - item.completes for item in prompts),
            tree_widths=widths,
        )

    def _pruned(self, budget: DraftBudget, candidates: Candidates, limits: "_Limits") -> DraftTree:
        """Prune candidates to the budget, and add rows and sizes of the trees to it; if they do not fit into the free
        slots, each gets an equal share."""
        load = budget.load
        trees, tree_sizes, node_rows = self._prune(candidates, budget, limits)
        if sum(node_rows) > load.free_slots:  # only with a fixed budget: step seconds are infinite above the free slots
            limits = limits._replace(max_nodes=limits.max_nodes.clamp(max=load.free_slots // load.num_decoding))
            trees, tree_sizes, node_rows = self._prune(candidates, budget, limits)
            budget.reason = "forced" if budget.reason == "forced" else "slots"
        budget.node_rows = (*node_rows, *(0,) * (load.num_sequences - len(node_rows)))
        budget.tree_sizes = tree_sizes
        return _with_empty_trees(trees, load.num_sequences)

    def _prune(
        self, candidates: Candidates, budget: DraftBudget, limits: "_Limits"
    ) -> tuple[DraftTree, Tensor, list[int]]:
        """Prune once. # -> trees, their sizes (see `Pruned`), and the rows laid out for each"""
        seconds = send_floats(self._device, budget.seconds(budget.load, candidates.tokens.numel()))
        width = self._pruning.width.choose(candidates, budget.load.free_slots, budget.max_nodes)
        trees, tree_sizes = self._pruning.prune(
            candidates, limits.max_depth, limits.max_nodes, seconds, limits.weights, width
        )
        node_rows = self._pruning.width.node_rows(tree_sizes, width)
        return trees.first(candidates.batch, max(node_rows, default=0)), tree_sizes, node_rows

    def _weights(self, decoding: Items[Sequence]) -> Tensor:
        """Weight of one token of each sequence in the choice of nodes. # -> [decoding] float32"""
        if self._pace_seconds is None:
            return self._even_weights(len(decoding))
        return pace_weights(decoding, self._pace_seconds, time.monotonic(), self._device)

    def _limits(self, decoding: Items[Sequence], max_nodes: int, ahead: Ahead | None) -> "_Limits":
        max_nodes = min(self._max_budget, max_nodes)
        rows, roots, seeds, max_depth, most = send_lines(
            self._device,
            [s.table_row for s in decoding],
            [s.num_computed for s in decoding],
            [s.sampling.params.seed for s in decoding],
            [s.num_remaining - 1 - s.awaits_token for s in decoding],
            [max_nodes if s.max_nodes is None else min(s.max_nodes, max_nodes) for s in decoding],
        )
        if ahead is not None:
            roots, max_depth = ahead.added(roots), ahead.added(max_depth, sign=-1).clamp(min=0)
        temperatures = send_floats(self._device, [s.sampling.params.temperature for s in decoding])
        return _Limits(rows, roots, seeds, max_depth, most, temperatures, self._weights(decoding))

    def _grow(self, decoding: Items[Sequence], load: StepLoad, limits: "_Limits", most: int) -> Candidates:
        """Run the drafter. `most`: number of positions that a launched step adds at most to a root.
        # -> its candidates, empty trees for sequences that do not draft: [decoding, nodes]"""
        drafting, count = decoding[: load.num_drafting], load.num_drafting
        roots = tuple(s.num_computed + (most if s.awaits_token else 0) for s in drafting)
        noise = Noise(
            seeds=limits.seeds[:count],
            temperatures=limits.temperatures[:count],
            positions=limits.roots[:count],
            warm=any(s.sampling.params.temperature for s in drafting),
            host=HostMetadata(tuple(s.table_row for s in drafting), roots),
            filters=filters_of([s.sampling for s in drafting]),
        )
        return _with_empty_trees(self.drafter.grow(limits.rows[:count], noise), len(decoding))

    def _with_known_tokens(self, decoding: Items[Sequence], candidates: Candidates) -> Candidates:
        """Add tokens that resumed streams replay and those that grammars force; drop what grammars forbid."""
        replayed, grammars = [s.replay_tokens for s in decoding], [s.sampling.grammar for s in decoding]
        if any(replayed):
            candidates = with_runs_of(candidates, replayed, self._max_budget)
        return constrained(candidates, grammars, self._max_budget) if any(grammars) else candidates

    def _notice_new_version(self) -> None:
        if self._version != self.drafter.version:
            self._version = self.drafter.version
            self.drafter.on_weights_changed()
            self._pruning.calibration.on_weights_changed()
            self.policy.on_weights_changed()


def pace_weights(sequences: Items[Sequence], pace_seconds: float, now: float, device: torch.device) -> Tensor:
    """Weight of one token of each sequence if a pace is promised: higher for sequences that are late.

    Token n is due n * pace_seconds after the first token. With n tokens after s seconds the weight is
    s / (n * pace_seconds), clamped to 1 to 4. # -> [sequences] float32
    """

    def weight(sequence: Sequence) -> float:
        if sequence.first_token_seconds is None:
            return 1.0
        due = pace_seconds * max(1, sequence.num_generated)
        return min(_MOST_URGENT, max(1.0, (now - sequence.first_token_seconds) / due))

    return send_floats(device, [weight(sequence) for sequence in sequences])


class _Limits(NamedTuple):
    """Inputs of the drafter and limits of the trees, on the device; all [decoding], int64 unless noted."""

    rows: Tensor  # rows of the slot table
    roots: Tensor  # absolute positions of the roots
    seeds: Tensor
    max_depth: Tensor  # number of tokens after the root that can still be emitted
    max_nodes: Tensor  # smallest limit of configuration, policy and request
    temperatures: Tensor  # float32
    weights: Tensor  # float32, see `DraftStage._weights`


def _with_empty_trees(trees: DraftTree, num_sequences: int) -> DraftTree:
    """Append trees without nodes until there is one tree per sequence."""
    missing = num_sequences - trees.batch
    if not missing:
        return trees
    empty = DraftTree(*(values.new_zeros(missing, *values.shape[1:]) for values in trees))
    return DraftTree.concatenated([trees, empty._replace(parents=empty.parents + ROOT)])
