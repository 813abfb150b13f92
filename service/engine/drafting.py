"""The draft stage: whether to draft, candidates from the drafter, cut to what can still be emitted, corrected by what
became of earlier ones, pruned to the budget; and what the step then teaches all of these.
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
from service.engine.budget import Budget, BudgetPolicy, Load, pace_weights
from service.engine.grammar import constrained, with_known
from service.engine.scheduler import Batch
from service.engine.sequence import Sequence
from service.engine.stats import StepStats
from service.engine.tree_pruning import TreePruning
from service.engine.tree_width import ExactWidth, FixedWidth, TreeWidth

_REPORT_EVERY = 64
"""Steps between two readings of the calibration error, for which the host waits for the device."""


class DraftStage:
    """Builds one draft tree per sequence of a batch; those that do not draft get a tree of zero nodes."""

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
        self._drafter = drafter
        self._policy = policy
        self._pace_seconds = pace_seconds
        self._max_budget = max_budget
        self._device = device
        captured = capture if max_budget else None
        self._width: TreeWidth = FixedWidth(max_budget, device) if captured else ExactWidth()
        self._calibration = SurvivalCalibration(device)
        self._pruning = TreePruning(
            self._calibration,
            capture=captured,
            max_batch=max_sequences,
            width=self._width,
            is_priced=policy.is_priced,
            device=device,
        )
        self._version = drafter.version
        self._num_learnt = 0
        self._num_blocks = drafter.num_blocks
        self._no_trees = cache(partial(DraftTree.empty, device=device))  # nobody changes them
        self._even = cache(partial(torch.ones, device=device))  # weights where all tokens count alike

    def start(self, sequences: Items[Sequence]) -> None:
        """Tell the drafter of sequences that begin, or begin again, to run."""
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
        """Tell the drafter of a sequence that no longer runs, and keep count of the prediction that came true."""
        sequence.predicted_tokens += self._drafter.finish([sequence.table_row])[0]

    def arrange(self, batch: Batch) -> Batch:
        """The batch with the sequences for which the drafter is asked in front of its other drafting ones."""
        asks = self._policy.asks([s.gain for s in batch.drafting], len(batch.items), begins=bool(batch.started))
        asked = {s for s, asks_now in zip(batch.drafting, asks, strict=True) if asks_now and s.max_nodes != 0}
        items = sorted(batch.items, key=lambda item: (not item.drafts, item.sequence not in asked))
        return Batch(items, batch.started, num_asked=len(asked))

    def build(self, batch: Batch, num_free_slots: int, *, drafts: bool = True) -> tuple[DraftTree, Budget]:
        """The step's trees, one line per item of the batch, and why they are as large; without `drafts` all are
        empty."""
        self._notice_new_version()
        drafting, lines = batch.drafting, len(batch.items)
        load = self._load(batch, num_free_slots)
        asks = drafts and any(sequence.max_nodes != 0 for sequence in drafting)
        refusal = "no_candidates" if not asks else self._policy.refusal(load) if load.has_room else "slots"
        will_ask = asks or any(item.sequence.max_nodes != 0 for item in batch.items)
        followed = refusal is None or (will_ask and self._policy.follows(load))
        is_forced = refusal == "suspended" and any(s.sampling.grammar or s.known_tokens for s in drafting)
        candidates = self._no_trees(len(drafting))
        if refusal is None or is_forced:
            numbers = self._numbers(drafting, min(self._max_budget, self._policy.most(load)))
            grown = candidates if is_forced else self._grow(drafting[: load.num_asked], numbers)
            candidates = self._with_what_is_known(drafting, _pad_lines(grown, len(drafting)))
        if refusal is not None and not candidates.width:
            none = (0,) * lines
            return self._no_trees(lines), Budget(load, refusal, none, drafted=False, followed=followed, nodes=none)
        reason = "cost" if self._policy.is_priced else "fixed"
        if is_forced:
            load = replace(load, asks_drafter=False)
        tree, sizes, widths = self._prune(candidates, load, numbers.deepest, numbers.wished)
        if sum(widths) > load.max_nodes:  # prices know what there is room for, other wishes do not
            fewer = numbers.wished.clamp(max=load.max_nodes // len(drafting))
            tree, sizes, widths = self._prune(candidates, load, numbers.deepest, fewer)
            reason = "slots"
        widths += [0] * (lines - len(widths))
        reason = "forced" if is_forced else reason
        decided = Budget(load, reason, tuple(widths), drafted=not is_forced, followed=followed, sizes=sizes)
        return _pad_lines(tree, lines), decided

    def settle(self, budget: Budget, sizes: Items[Items[int]]) -> Budget:
        """The decision, now that the host knows its trees. # sizes [completing, 3] as of the budget's"""
        load = budget.load
        if budget.sizes is None:
            return budget
        wanted, nodes, worth = zip(*sizes[: load.num_drafting], strict=True)
        self._width.learn(wanted)
        reason, widths = budget.reason, budget.widths
        if reason == "cost" and not any(nodes):
            reason = "does_not_pay" if any(worth) else "no_candidates"
        nodes += (0,) * (len(widths) - len(nodes))
        return Budget(load, reason, widths, budget.drafted, budget.followed, budget.sizes, nodes)

    def learn(self, budget: Budget, committed: Committed, stats: StepStats, *, timed: bool = True) -> None:
        """Take in what became of the step's trees, and fill in its report: what had been predicted, and what drafter
        and calibration say of themselves. `timed`: whether the step's times say what steps take.

        Lines of what was committed are the completing sequences, of which the drafting ones stand first.
        """
        load = budget.load
        if committed.tree.width:
            self._pruning.learn(committed.tokens[: load.num_drafting], committed.counts[: load.num_drafting])
        if timed:
            reads_prompts = load.num_rows != load.num_drafting
            self._drafter.timed(StepTimes(stats.seconds, stats.follow_seconds, reads_prompts=reads_prompts))
            stats.predicted_verify_seconds = self._policy.learn(budget, stats)
        stats.drafting = self._policy.outlook(load)
        stats.drafted_blocks, self._num_blocks = self._drafter.num_blocks - self._num_blocks, self._drafter.num_blocks
        stats.memory = self._drafter.memory_counts()
        self._num_learnt += 1
        if self._num_learnt % _REPORT_EVERY == 0:
            stats.survival_error = self._calibration.error()
            ranks = self._drafter.rank_outcomes()
            stats.rank_predicted, stats.rank_right = ranks.predicted, ranks.right

    def _load(self, batch: Batch, num_free_slots: int) -> Load:
        pace, num_extend_rows = self._pace_seconds, batch.num_extend_rows
        ends = sum(item.start + item.num_rows for item in batch.items)
        return Load(
            num_rows=num_extend_rows,
            context=ends / max(1, len(batch.items)),
            max_nodes=num_free_slots - num_extend_rows,
            num_drafting=len(batch.drafting),
            num_sequences=len(batch.items),
            begins=bool(batch.started),
            widths=self._width.choices,
            texts=tuple(s.gain for s in batch.drafting),
            reading=tuple(item.sequence.gain for item in batch.items if not item.drafts),
            asked=batch.num_asked,
            weights=None if pace is None else pace_weights(batch.drafting, pace, time.monotonic(), self._device),
        )

    def _notice_new_version(self) -> None:
        if self._version != self._drafter.version:
            self._version = self._drafter.version
            for part in (self._drafter, self._calibration, self._policy):
                part.on_weights_changed()

    def _prune(
        self, candidates: Candidates, load: Load, deepest: Tensor, wished: Tensor
    ) -> tuple[DraftTree, Tensor, list[int]]:
        """Trees, their sizes as of `Pruned`, and the rows for nodes that each gets."""
        seconds = send_floats(self._device, self._policy.price(load, candidates.tokens.numel()))
        weights = self._even(candidates.batch) if load.weights is None else load.weights
        width = self._width.lay_out(candidates, load.max_nodes)
        trees, sizes = self._pruning.prune(candidates, deepest, wished, seconds, weights, width)
        rows = self._width.rows(sizes, width)
        return trees.first(candidates.batch, max(rows, default=0)), sizes, rows

    def _numbers(self, drafting: Items[Sequence], most: int) -> "_Numbers":
        rows, roots, seeds, deepest, wished = send_lines(
            self._device,
            [s.table_row for s in drafting],
            [len(s.tokens) - 1 for s in drafting],
            [s.sampling.params.seed for s in drafting],
            [s.num_remaining - 1 for s in drafting],
            [most if s.max_nodes is None else min(s.max_nodes, most) for s in drafting],
        )
        temperatures = send_floats(self._device, [s.sampling.params.temperature for s in drafting])
        return _Numbers(rows, roots, seeds, deepest, wished, temperatures)

    def _grow(self, drafting: Items[Sequence], numbers: "_Numbers") -> Candidates:
        asked = len(drafting)
        noise = Noise(
            seeds=numbers.seeds[:asked],
            temperatures=numbers.temperatures[:asked],
            positions=numbers.roots[:asked],
            warm=any(s.sampling.params.temperature for s in drafting),
            host=HostMetadata(tuple(s.table_row for s in drafting), tuple(len(s.tokens) - 1 for s in drafting)),
        )
        return self._drafter.grow(numbers.rows[:asked], noise)

    def _with_what_is_known(self, drafting: Items[Sequence], candidates: Candidates) -> Candidates:
        """With what answers have said before; without what grammars forbid, and with what these force."""
        again, grammars = [s.known_tokens for s in drafting], [s.sampling.grammar for s in drafting]
        if any(again):
            candidates = with_known(candidates, again, self._max_budget)
        return constrained(candidates, grammars, self._max_budget) if any(grammars) else candidates


class _Numbers(NamedTuple):
    """What the host knows of the drafting sequences, on the device; all [drafting]."""

    rows: Tensor  # int64, as all but temperatures
    roots: Tensor  # absolute positions
    seeds: Tensor
    deepest: Tensor  # nodes behind the root that can still be emitted
    wished: Tensor  # most nodes by configuration and request
    temperatures: Tensor  # float32


def _pad_lines(tree: DraftTree, lines: int) -> DraftTree:
    """Append trees of zero nodes."""
    missing = lines - tree.batch
    if not missing:
        return tree
    empty = DraftTree(*(values.new_zeros(missing, *values.shape[1:]) for values in tree))
    return DraftTree.concatenated([tree, empty._replace(parents=empty.parents + ROOT)])
