"""How many drafted nodes each sequence verifies in a step, and whether to draft at all. A matter of speed only: no
choice changes the text.

By cost: one decision for the whole batch, made anew in every step (`service/engine/shares.py`). With candidates of all
sequences sorted by survival, S(N) the sum of the first N, B drafting sequences and R rows that run in any case:

    N* = argmax_N (B + S(N)) / (T_draft + T(B) + T_verify(R + N) - T_verify(R))

T(B) is what a plain step of these B sequences takes; prompt rows of the same step are paid anyway and do not count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from drafters.tree import Candidates
from service.engine.costs.model import FREE, CostTable, DraftCosts
from service.engine.draft_gain import DraftGain
from service.engine.load import Load, StepOutcome
from service.engine.shares import allocate_nodes

__all__ = ["REASONS", "Budget", "BudgetPolicy", "CostBudget", "FixedBudget", "Load", "PerBatchSizeBudget", "Share"]

REASONS = ("no_candidates", "does_not_pay", "cost", "fixed", "slots", "stands_down", "reference")

Share = Callable[[Candidates, Tensor, Tensor, Tensor], Tensor]
"""As `allocate_nodes`."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A step's decision."""

    num_keep: Tensor  # [batch] int64, nodes per sequence
    reason: str  # one of REASONS
    nodes: tuple[int, ...] = ()  # of each line of the step's trees, known to the host once they are built

    def told(self, nodes: Sequence[int], candidates: Candidates) -> "Budget":
        """The same with each line's nodes; where costs allow none at all, it says whether there were any to allow."""
        reason = self.reason
        if reason == "cost" and not any(nodes):
            there_were = bool((candidates.survival > 0).any())  # planned transfer: of a step without trees
            reason = "does_not_pay" if there_were else "no_candidates"
        return replace(self, nodes=tuple(nodes), reason=reason)


class BudgetPolicy(Protocol):
    """Chooses each sequence's number of nodes, at most limits[b] of them."""

    def refusal(self, load: Load) -> str | None:
        """Why nothing is to be drafted in this step, one of REASONS; None where the drafter is to be asked."""
        ...

    def follows(self, load: Load) -> bool:
        """Whether the drafter is to take in what this step reads and commits: if not, it is not asked for long."""
        ...

    def choose(self, candidates: Candidates, limits: Tensor, load: Load, share: Share = allocate_nodes) -> Budget:
        """`share` computes `allocate_nodes`, as it is or in a replay."""
        ...

    def renew(self) -> None:
        """Other weights draft from now on."""
        ...

    def learn(self, outcome: StepOutcome) -> float | None:
        """Take in what a step took; returns the verify seconds that had been predicted, if any had."""
        ...


class FixedBudget:
    """The same number of nodes in every step, however likely they are."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def refusal(self, load: Load) -> str | None:
        return None if self._nodes else "fixed"

    def follows(self, load: Load) -> bool:
        return self._nodes > 0

    def choose(self, candidates: Candidates, limits: Tensor, load: Load, share: Share = allocate_nodes) -> Budget:
        return _capped(candidates, limits, load, self._nodes)

    def renew(self) -> None:
        """The same whoever drafts."""

    def learn(self, outcome: StepOutcome) -> float | None:
        return None


class PerBatchSizeBudget:
    """A fixed number of nodes for each number of drafting sequences, from a table written by hand."""

    def __init__(self, nodes_from: Mapping[int, int]) -> None:
        """`nodes_from` gives the nodes of each sequence from that many sequences on; it names 1."""
        assert 1 in nodes_from, "the table says nothing of a single sequence"
        self._nodes_from = sorted(nodes_from.items())

    def refusal(self, load: Load) -> str | None:
        return None if self._nodes(load) else "fixed"

    def follows(self, load: Load) -> bool:
        return True

    def choose(self, candidates: Candidates, limits: Tensor, load: Load, share: Share = allocate_nodes) -> Budget:
        return _capped(candidates, limits, load, self._nodes(load))

    def renew(self) -> None:
        """The same whoever drafts."""

    def learn(self, outcome: StepOutcome) -> float | None:
        return None

    def _nodes(self, load: Load) -> int:
        return [nodes for batch, nodes in self._nodes_from if batch <= max(1, load.num_drafting)][-1]


class CostBudget:
    """The number of nodes that maximises expected tokens per second over the whole batch.

    Every N is looked at, because cost curves are staircases. N* = 0 is plain decoding.
    """

    def __init__(self, costs: CostTable, drafts: DraftCosts = FREE) -> None:
        self._gain = DraftGain(costs, drafts)

    def refusal(self, load: Load) -> str | None:
        return self._gain.refusal(load)

    def follows(self, load: Load) -> bool:
        return self._gain.follows(load)

    def choose(self, candidates: Candidates, limits: Tensor, load: Load, share: Share = allocate_nodes) -> Budget:
        weights = candidates.survival.new_ones(limits.shape) if load.weights is None else load.weights
        num_keep = share(candidates, limits, self._seconds(load, candidates), weights)
        return Budget(num_keep, "cost")

    def renew(self) -> None:
        self._gain.renew()

    def learn(self, outcome: StepOutcome) -> float | None:
        return self._gain.learn(outcome)

    def _seconds(self, load: Load, candidates: Candidates) -> Tensor:
        """Seconds of a step with 0, 1, ... nodes, without what its prompt rows take. # -> [all nodes + 1]"""
        most = candidates.tokens.numel()
        rows = load.num_rows + np.arange(max(0, min(load.max_nodes, most)) + 1, dtype=np.float64)
        verify = self._gain.costs.verify_seconds(rows, load.context, load.num_sequences)
        seconds = np.full(most + 1, np.inf, dtype=np.float32)
        seconds[: rows.shape[0]] = (
            self._gain.draft_seconds(load) + self._gain.plain_seconds(load) + (verify - verify[0])
        )
        return torch.from_numpy(seconds).to(candidates.tokens.device, non_blocking=True)


def _capped(candidates: Candidates, limits: Tensor, load: Load, nodes: int) -> Budget:
    """So many nodes for everybody, or an equal share of the slots there are."""
    keep = torch.minimum(limits, candidates.num_nodes).clamp(max=nodes)
    if nodes * keep.shape[0] <= load.max_nodes or int(keep.sum()) <= load.max_nodes:
        return Budget(keep, "fixed")
    return Budget(keep.clamp(max=load.max_nodes // max(1, keep.shape[0])), "slots")
