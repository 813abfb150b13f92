"""How many drafted nodes each sequence verifies in a step, and whether to draft at all. A matter of speed only: no
choice changes the text.

By cost: one decision for the whole batch, made anew in every step. With candidates of all sequences sorted by survival,
S(N) the sum of the first N, B drafting sequences (or what their certain tokens count) and R rows that run in any case:

    N* = argmax_N (B + S(N)) / (T_draft + T(B) + T_verify(R + N) - T_verify(R))

T(B) is what a plain step of these B sequences takes; prompt rows of the same step are paid anyway and do not count.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafters.gating import LedgersBySize
from drafters.tree import Candidates, survival_order
from service.engine.costs.model import FREE, CostTable, DraftCosts, OnlineCosts, OnlineDraftCosts
from service.engine.sequence import Sequence as Running
from service.engine.stats import StepStats

REASONS = ("no_candidates", "does_not_pay", "cost", "fixed", "slots", "stands_down", "reference")

_MOST_URGENT = 4.0

_FIRST_PROBES = 2
_FIRST_PAUSE = 8
_LONGEST_PAUSE = 128
_LONGEST_CLEAR_PAUSE = 512
"""A size of batch begins with plain steps (baseline probes), and has others after so many steps with nodes, more and
more of them: what drafting gains is measured against what a plain step takes."""
_BESIDE_PROMPTS = 0.25
"""What a plain step counts that reads prompts too, for it says little of one that does not."""
_PROBES = 4
_CLEAR = 0.25
"""A plain step among others is slower than one of many in a row (caches hold the drafter), by a tenth on CPUs. It takes
several to know what plain decoding would take, unless drafting gains more plain steps per step than this."""
_UNSEEN = 0.05
"""Plain steps that a step with drafts costs beside what the clocks around its stages say, as measured with eight
sequences: caches that its rows leave cold, and prompts that are read in more and smaller parts."""
_MOST_TIMES = 1.5  # what was expected: a hiccup is nobody's fault
_RATE = 0.05
_AHEAD = 64
"""Steps for which texts are followed before drafts are tried again: of texts it has not followed a drafter knows too
little to show what it is worth."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a step carries beside draft trees."""

    num_rows: int  # rows that run in any case: roots and prompt chunks
    context: float  # mean context length of the step's sequences, tokens
    max_nodes: int  # most nodes in all, because slots are short
    num_drafting: int = 1  # sequences that may have a tree
    num_sequences: int = 1  # all of the step's sequences
    weights: Tensor | None = None  # [drafting] float32, what a token of each counts; None: all the same


@dataclass(frozen=True, slots=True)
class Budget:
    """A step's decision."""

    load: Load
    reason: str  # one of REASONS
    nodes: tuple[int, ...]  # of each line of the step's trees
    drafted: bool  # whether the drafter was asked
    followed: bool  # whether it is to take in prompts and answers


def pace_weights(sequences: Sequence[Running], pace_seconds: float, now: float, device: torch.device) -> Tensor:
    """What one token of each sequence counts where latency matters. # -> [sequences] float32

    Token n is due n times the pace after the first; n tokens in s seconds count s / (n * pace), between 1 and 4.
    """

    def weight(sequence: Running) -> float:
        if sequence.first_token_seconds is None:
            return 1.0
        due = pace_seconds * max(1, sequence.num_generated)
        return min(_MOST_URGENT, max(1.0, (now - sequence.first_token_seconds) / due))

    return torch.tensor([weight(sequence) for sequence in sequences], device=device)


def allocate_nodes(candidates: Candidates, limits: Tensor, seconds: Tensor, weights: Tensor) -> Tensor:
    """Nodes per sequence for the most expected tokens per second. # -> [batch] int64

    limits [batch] int64, at most so many of each, below 0 for a line that is no sequence; seconds
    [batch * nodes + 1] float32 of a step with 0, 1, ... nodes, infinite for more than there is room for; weights
    [batch] float32, what one token of each counts.
    """
    worth, owners = survival_order(candidates, limits, weights)
    is_sequence = limits >= 0
    expected = (weights * is_sequence).sum() + torch.cat([worth.new_zeros(1), worth.cumsum(0)])
    best = (expected / seconds).argmax()
    if candidates.batch > 1:
        owners = torch.where(best > is_sequence.sum(), _best_of_each_first(owners, candidates.batch), owners)
    is_chosen = (torch.arange(owners.shape[0], device=owners.device) < best) & (owners >= 0)
    return torch.zeros_like(limits).scatter_add_(0, owners.clamp(min=0), is_chosen.to(limits.dtype))


def _best_of_each_first(owners: Tensor, batch: int) -> Tensor:
    """The order again, but each sequence's best node before anybody's second: nobody goes without a tree for being a
    little less sure than all others. # owners [nodes] int64, -1 padded at the end -> [nodes]"""
    places = torch.arange(owners.shape[0], device=owners.device)
    lines = torch.where(owners < 0, batch, owners)
    first = places.new_full((batch + 1,), owners.shape[0]).scatter_reduce_(0, lines, places, "amin")
    is_best = (first[lines] == places) & (owners >= 0)
    return owners[torch.where(is_best, places - owners.shape[0], places).argsort(stable=True)]


Share = Callable[[Candidates, Tensor, Tensor, Tensor], Tensor]
"""As `allocate_nodes`."""


class BudgetPolicy(ABC):
    """Chooses each sequence's number of nodes, at most limits[b] of them."""

    @abstractmethod
    def refusal(self, load: Load) -> str | None:
        """Why nothing is to be drafted in this step, one of REASONS; None where the drafter is to be asked."""

    @abstractmethod
    def follows(self, load: Load) -> bool:
        """Whether the drafter is to take in what this step reads and commits: if not, it is not asked for long."""

    @abstractmethod
    def choose(
        self, candidates: Candidates, limits: Tensor, load: Load, share: Share = allocate_nodes
    ) -> tuple[Tensor, str]:
        """Nodes per sequence, and why; `share` computes `allocate_nodes`, as it is or in a CUDA graph. # -> [batch]"""

    def renew(self) -> None:  # noqa: B027
        """Other weights draft from now on."""

    def learn(self, budget: Budget, stats: StepStats) -> float | None:
        """Take in what a step took, as the host had to wait for it; returns the verify seconds that had been predicted,
        if any had."""
        return None


class FixedBudget(BudgetPolicy):
    """The same number of nodes in every step, however likely they are, or one for each number of drafting sequences."""

    def __init__(self, nodes: int | Mapping[int, int]) -> None:
        """A mapping gives the nodes of each sequence from that many sequences on; it names 1."""
        table = {1: nodes} if isinstance(nodes, int) else nodes
        assert 1 in table, "the table says nothing of a single sequence"
        self._nodes_from = sorted(table.items())

    def refusal(self, load: Load) -> str | None:
        return None if self._nodes(load) else "fixed"

    def follows(self, load: Load) -> bool:
        return any(nodes for _, nodes in self._nodes_from)

    def choose(
        self, candidates: Candidates, limits: Tensor, load: Load, share: Share = allocate_nodes
    ) -> tuple[Tensor, str]:
        nodes = self._nodes(load)
        keep = torch.minimum(limits, candidates.num_nodes).clamp(max=nodes)
        if nodes * keep.shape[0] <= load.max_nodes or int(keep.sum()) <= load.max_nodes:
            return keep, "fixed"
        return keep.clamp(max=load.max_nodes // max(1, keep.shape[0])), "slots"

    def _nodes(self, load: Load) -> int:
        return [nodes for batch, nodes in self._nodes_from if batch <= max(1, load.num_drafting)][-1]


class CostBudget(BudgetPolicy):
    """The number of nodes that maximises expected tokens per second over the whole batch; none is plain decoding.

    Every N is looked at, because cost curves are staircases. Every step is compared with what a plain one of the same
    sequences takes, in which the drafter would not even have to follow the texts; gains and losses go into a ledger for
    each size of batch, so that a drafter that does not pay costs a share of 1 % at most, whatever it claims. Following
    texts is owed by the drafts that come of it; where none are to come for long, texts are not followed.
    """

    def __init__(self, costs: CostTable, drafts: DraftCosts = FREE) -> None:
        self._costs = OnlineCosts(costs)
        self._drafts = OnlineDraftCosts(drafts)
        self._ledgers = LedgersBySize()
        self._baselines: defaultdict[int, _Baseline] = defaultdict(_Baseline)  # by size of batch, in powers of two

    def refusal(self, load: Load) -> str | None:
        if not self._ledgers.of(load.num_sequences).is_open:
            return "stands_down"
        return "reference" if self._baseline(load).probes_due else None

    def follows(self, load: Load) -> bool:
        return self._ledgers.of(load.num_sequences).opens_within(_AHEAD)

    def choose(
        self, candidates: Candidates, limits: Tensor, load: Load, share: Share = allocate_nodes
    ) -> tuple[Tensor, str]:
        weights = candidates.survival.new_ones(limits.shape) if load.weights is None else load.weights
        return share(candidates, limits, self._seconds(load, candidates), weights), "cost"

    def renew(self) -> None:
        """What the old weights lost says little of the new ones."""
        self._ledgers.renew()

    def learn(self, budget: Budget, stats: StepStats) -> float | None:
        load = budget.load
        if budget.followed:
            self._baseline(load).owed_seconds += stats.follow_seconds
        if load.num_drafting:
            self._settle(self._baseline(load), budget, stats)
        rows = load.num_rows + stats.drafted_nodes
        # Settled first: what a step with drafts took must not become what a plain one would have taken.
        return self._costs.learn(rows, load.context, load.num_sequences, stats.verify_seconds)

    def _seconds(self, load: Load, candidates: Candidates) -> Tensor:
        """Seconds of a step with 0, 1, ... nodes, without what its prompt rows take. # -> [all nodes + 1]"""
        most = candidates.tokens.numel()
        rows = load.num_rows + np.arange(max(0, min(load.max_nodes, most)) + 1, dtype=np.float64)
        verify = self._costs.verify_seconds(rows, load.context, load.num_sequences)
        drafting = self._drafts.draft_seconds(max(1, load.num_drafting))
        seconds = np.full(most + 1, np.inf, dtype=np.float32)
        seconds[: rows.shape[0]] = drafting + self._plain_seconds(load) + (verify - verify[0])
        return torch.from_numpy(seconds).to(candidates.tokens.device, non_blocking=True)

    def _plain_seconds(self, load: Load) -> float:
        """Of a plain step of the drafting sequences alone, without the prompts that are read beside them."""
        batch = max(1, load.num_drafting)
        verify = self._costs.verify_seconds(np.array([float(batch)]), load.context, batch)
        return float(verify[0]) + self._baseline(load).plain_other_seconds

    def _baseline(self, load: Load) -> "_Baseline":
        return self._baselines[load.num_sequences.bit_length()]

    def _settle(self, baseline: "_Baseline", budget: Budget, stats: StepStats) -> None:
        """Enter what drafting gained or cost in this step, in plain steps."""
        load, ledger = budget.load, self._ledgers.of(budget.load.num_sequences)
        other_seconds = stats.other_seconds - stats.follow_seconds
        baseline.count(stats.drafted_nodes, reads=load.num_rows > load.num_drafting)
        plain = self._plain_seconds(load)
        if not budget.drafted:
            baseline.note_plain(other_seconds)
            ledger.rest()
            return
        rows = load.num_rows + np.array([0.0, stats.drafted_nodes])
        without, predicted = map(float, self._costs.verify_seconds(rows, load.context, load.num_sequences))
        # What it took, whatever had been expected of so many rows; but nodes make no forward faster, only clocks do.
        verify = min(max(stats.verify_seconds, without), _MOST_TIMES * predicted)
        drafting = self._drafts.learn(load.num_drafting, stats.draft_seconds)
        spent = drafting + verify - without + baseline.note_drafted(other_seconds)
        gained = stats.accepted_tokens / load.num_drafting * plain
        gain = (gained - spent) / plain - _UNSEEN
        baseline.note_gain(gain)
        # Where some still read their prompts, a step of those that draft is a part of what the ledger is counted in.
        ledger.settle(load.num_drafting / load.num_sequences * (gain - baseline.pay() / plain))


class _Baseline:
    """What is known of plain steps of one size of batch, and when they are to be probed again."""

    def __init__(self) -> None:
        self.probes_due = float(_FIRST_PROBES)
        self.plain_other_seconds = 0.0
        self.owed_seconds = 0.0  # taken by following texts since drafts were last tried
        self._steps_with_nodes = 0
        self._pause = _FIRST_PAUSE
        self._drafted_other_seconds = 0.0
        self._gain = 0.0
        self._gains_noted = 0

    def count(self, num_nodes: int, *, reads: bool) -> None:
        """One more step, with so many nodes, that reads prompts or not."""
        if not num_nodes:
            self.probes_due = max(0.0, self.probes_due - (_BESIDE_PROMPTS if reads else 1.0))
            return
        self._steps_with_nodes += 1
        if self._steps_with_nodes >= self._pause:
            clear = self._gain > _CLEAR
            self.probes_due = 1.0 if clear else float(_PROBES)
            self._steps_with_nodes = 0
            self._pause = min(_LONGEST_CLEAR_PAUSE if clear else _LONGEST_PAUSE, 2 * self._pause)

    def pay(self) -> float:
        """What following the texts has taken until now."""
        owed, self.owed_seconds = self.owed_seconds, 0.0
        return owed

    def note_gain(self, gain: float) -> None:
        """A step with drafts gained so many plain ones."""
        self._gains_noted += 1
        self._gain += max(_RATE, 1 / self._gains_noted) * (gain - self._gain)

    def note_plain(self, seconds: float) -> None:
        self.plain_other_seconds = _moved(self.plain_other_seconds, seconds)

    def note_drafted(self, seconds: float) -> float:
        """Returns how much longer everything but drafting and verifying takes when there are drafts."""
        self._drafted_other_seconds = _moved(self._drafted_other_seconds, seconds)
        return max(0.0, self._drafted_other_seconds - self.plain_other_seconds) if self.plain_other_seconds else 0.0


def _moved(mean: float, value: float) -> float:
    return mean + _RATE * (value - mean) if mean else value
