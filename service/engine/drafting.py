"""The draft stage: whether to draft, candidates from the drafter, cut to what can still be emitted, corrected by what
became of earlier ones, pruned to the budget; and what the step then teaches all of these.
"""

import time
from collections.abc import Sequence as Items
from dataclasses import replace

import torch
from torch import Tensor

from drafters.calibration import SurvivalCalibration
from drafters.protocol import Committed, DraftContext, Drafter, HostMetadata, Noise, RankOutcomes
from drafters.tree import Candidates, DraftTree
from kernels.graph_runner import Capture
from service.engine.budget import Budget, BudgetPolicy, Load, pace_weights
from service.engine.grammar import constrained
from service.engine.scheduler import Batch
from service.engine.sequence import Sequence
from service.engine.stats import StepStats
from service.engine.tree_pruning import TreePruning

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
        """With `capture` the trees of up to `max_sequences` are pruned by CUDA graphs."""
        self._drafter = drafter
        self._policy = policy
        self._pace_seconds = pace_seconds
        self._max_budget = max_budget
        self._device = device
        self._calibration = SurvivalCalibration(device)
        self._pruning = TreePruning(
            self._calibration,
            capture=capture if max_budget else None,
            max_batch=max_sequences,
            width=max_budget,
            device=device,
        )
        self._version = drafter.version
        self._num_learnt = 0
        self._num_blocks = drafter.num_blocks

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
                    )
                    for s in sequences
                ]
            )

    def stop(self, sequence: Sequence) -> None:
        """Tell the drafter of a sequence that no longer runs, and keep count of the prediction that came true."""
        sequence.predicted_tokens += self._drafter.finish([sequence.table_row])[0]

    def build(self, batch: Batch, num_free_slots: int) -> tuple[DraftTree, Budget]:
        """The step's trees, one line per item of the batch, and the decision behind their size."""
        self._notice_new_version()
        drafting, lines = batch.drafting, len(batch.items)
        load = self._load(batch, num_free_slots)
        asks = any(sequence.max_nodes != 0 for sequence in drafting)
        refusal = self._policy.refusal(load) if asks else "no_candidates"
        will_ask = asks or any(item.sequence.max_nodes != 0 for item in batch.items)
        followed = refusal is None or (will_ask and self._policy.follows(load))
        candidates = self._grow(drafting) if refusal is None else self._forced(drafting, refusal)
        if candidates is None:
            assert refusal is not None, "a drafter that is asked answers"
            return DraftTree.empty(lines, self._device), Budget(load, refusal, (0,) * lines, False, followed)
        chosen, reason = self._policy.choose(candidates, self._limits(drafting, candidates), load, self._pruning.share)
        num_keep = torch.minimum(chosen, candidates.num_nodes)
        nodes: list[int] = num_keep.tolist()  # planned transfer: how large the step will be
        if reason == "cost" and not any(nodes):
            there_were = bool((candidates.survival > 0).any())  # planned transfer: of a step without trees
            reason = "does_not_pay" if there_were else "no_candidates"
        tree = self._pruning.keep(num_keep, max(nodes))
        nodes += [0] * (lines - len(nodes))
        reason = reason if refusal is None else "forced"
        return _pad_lines(tree, lines), Budget(load, reason, tuple(nodes), drafted=refusal is None, followed=followed)

    def learn(self, budget: Budget, committed: Committed, stats: StepStats, *, timed: bool = True) -> StepStats:
        """Take in what became of the step's trees; returns its report with what had been predicted, and what
        drafter and calibration say of themselves. `timed`: whether the step's times say what steps take.

        Lines of what was committed are the completing sequences, of which the drafting ones stand first.
        """
        if committed.tree.width:
            drafting = budget.load.num_drafting
            self._pruning.learn(committed.tokens[:drafting], committed.counts[:drafting])
        self._num_learnt += 1
        is_due = self._num_learnt % _REPORT_EVERY == 0
        ranks = self._drafter.rank_outcomes() if is_due else RankOutcomes()
        new_blocks, self._num_blocks = self._drafter.num_blocks - self._num_blocks, self._drafter.num_blocks
        return replace(
            stats,
            predicted_verify_seconds=self._policy.learn(budget, self._as_waited_for(stats)) if timed else None,
            drafting=self._policy.outlook(budget.load),
            drafted_blocks=new_blocks,
            survival_error=self._calibration.error() if is_due else None,
            rank_predicted=ranks.predicted,
            rank_right=ranks.right,
        )

    def _as_waited_for(self, stats: StepStats) -> StepStats:
        """On a device launches return at once; what waits is the transfer of emitted tokens, timed with the rest."""
        if self._device.type == "cpu":
            return stats
        verify = stats.verify_seconds + stats.other_seconds
        return replace(stats, verify_seconds=verify, follow_seconds=0.0, other_seconds=0.0)

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
            weights=None if pace is None else pace_weights(batch.drafting, pace, time.monotonic(), self._device),
        )

    def _notice_new_version(self) -> None:
        if self._version != self._drafter.version:
            self._version = self._drafter.version
            for part in (self._drafter, self._calibration, self._policy):
                part.renew()

    def _grow(self, drafting: Items[Sequence]) -> Candidates:
        host = HostMetadata(tuple(s.table_row for s in drafting), tuple(len(s.tokens) - 1 for s in drafting))
        temperatures = [s.sampling.params.temperature for s in drafting]
        noise = Noise(
            seeds=self._tensor([s.sampling.params.seed for s in drafting]),
            temperatures=torch.tensor(temperatures, device=self._device),
            positions=self._tensor(host.roots),
            warm=any(temperatures),
            host=host,
        )
        return self._corrected(drafting, self._drafter.grow(self._tensor(host.rows), noise))

    def _forced(self, drafting: Items[Sequence], refusal: str) -> Candidates | None:
        """What grammars force where drafting is suspended, which needs no drafter; None where there is nothing."""
        if refusal != "suspended" or not any(sequence.sampling.grammar for sequence in drafting):
            return None
        forced = self._corrected(drafting, DraftTree.empty(len(drafting), self._device))
        return forced if forced.width else None

    def _corrected(self, drafting: Items[Sequence], candidates: Candidates) -> Candidates:
        """By grammars, by what can still be emitted, by what became of earlier ones."""
        grammars = [s.sampling.grammar for s in drafting]
        if any(grammars):
            candidates = constrained(candidates, grammars, self._max_budget)
        deepest = self._tensor([s.num_remaining - 1 for s in drafting])
        return self._pruning.correct(candidates, deepest)

    def _limits(self, drafting: Items[Sequence], candidates: Candidates) -> Tensor:
        """Most nodes of each sequence: by configuration, by its own wish, by what is worth verifying. # -> [batch]"""
        wished = [self._max_budget if s.max_nodes is None else min(s.max_nodes, self._max_budget) for s in drafting]
        return torch.minimum(self._tensor(wished), (candidates.survival > 0).sum(1))

    def _tensor(self, values: Items[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _pad_lines(tree: DraftTree, lines: int) -> DraftTree:
    """Append trees of zero nodes."""
    missing = lines - tree.batch
    return DraftTree(*(torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) for values in tree))
