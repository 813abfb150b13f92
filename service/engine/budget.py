"""How many drafted nodes each sequence verifies in a step. A matter of speed only: no choice changes the text."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drafters.select import survival_order
from drafters.tree import Candidates
from service.engine.cost import CostTable


@dataclass(frozen=True, slots=True)
class Load:
    """What a step carries beside draft trees."""

    num_rows: int  # rows that run in any case: roots and prompt chunks
    context: float  # mean context length of the drafting sequences, tokens
    max_nodes: int  # most nodes in all, because slots are short


@dataclass(frozen=True, slots=True)
class Budget:
    """A step's decision."""

    num_keep: Tensor  # [batch] int64, nodes per sequence
    reason: str  # one of REASONS


REASONS = ("no_candidates", "does_not_pay", "cost", "fixed", "slots")


class BudgetPolicy(Protocol):
    """Chooses each sequence's number of nodes, at most limits[b] of them."""

    def choose(self, candidates: Candidates, limits: Tensor, load: Load) -> Budget: ...


class FixedBudget:
    """The same number of nodes in every step, however likely they are."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def choose(self, candidates: Candidates, limits: Tensor, load: Load) -> Budget:
        keep = torch.minimum(limits, candidates.num_nodes).clamp(max=self._nodes)
        fits = int(keep.sum()) <= load.max_nodes
        share = load.max_nodes // max(1, keep.shape[0])
        return Budget(keep, "fixed") if fits else Budget(keep.clamp(max=share), "slots")


class CostBudget:
    """The number of nodes that maximises expected tokens per second over the whole batch.

    With candidates of all sequences sorted by survival, S(N) the sum of the first N, B sequences and R rows that run
    in any case:

        N* = argmax_N (B + S(N)) / T_verify(R + N, context)

    Every N is looked at, because cost curves are staircases. N* = 0 is plain decoding.
    """

    def __init__(self, costs: CostTable) -> None:
        self._costs = costs

    def choose(self, candidates: Candidates, limits: Tensor, load: Load) -> Budget:
        batch = limits.shape[0]
        survival, owners = survival_order(candidates, limits)
        survival, owners = survival[: load.max_nodes], owners[: load.max_nodes]
        expected = batch + torch.cat([survival.new_zeros(1), survival.cumsum(0)])  # [N + 1]
        rows = load.num_rows + torch.arange(expected.shape[0], device=expected.device)
        rate = expected / self._costs.verify_seconds(rows, load.context)
        best = int(rate.argmax())
        chosen = owners[:best]
        keep = torch.bincount(chosen[chosen >= 0], minlength=batch)
        return Budget(keep, _reason(best, survival))


def _reason(best: int, survival: Tensor) -> str:
    if best > 0:
        return "cost"
    return "does_not_pay" if bool((survival > 0).any()) else "no_candidates"
