"""The budget against brute force: every number of nodes is looked at, and no limit is broken."""

import random

import pytest
import torch

from drafters.tree import Candidates, DraftTree
from service.engine.budget import REASONS, Budget, CostBudget, FixedBudget, Load
from service.engine.cost import CostTable

torch.set_num_threads(1)


def candidates_of(survival: list[list[float]]) -> Candidates:
    """Chains whose nodes have these survivals, falling."""
    width = max((len(line) for line in survival), default=0)
    padded = torch.tensor([line + [0.0] * (width - len(line)) for line in survival]).view(len(survival), width)
    counts = torch.tensor([len(line) for line in survival], dtype=torch.int64)
    nodes = torch.arange(width).expand(len(survival), width)
    valid = nodes < counts[:, None]
    return DraftTree(nodes * valid, torch.where(valid, nodes - 1, -1), (nodes + 1) * valid, padded, counts)


def staircase(rng: random.Random) -> CostTable:
    rows = [1, 2, 3, 8, 9, 16, 17, 60]
    seconds = sorted(rng.choice([1.0, 1.5, 2.0, 3.0, 5.0]) for _ in rows)
    return CostTable(torch.tensor(rows).float(), torch.tensor([1.0, 100.0]), torch.tensor([seconds, seconds]))


def random_survival(rng: random.Random, batch: int) -> list[list[float]]:
    return [sorted((rng.random() for _ in range(rng.randrange(9))), reverse=True) for _ in range(batch)]


def best_rate(survival: list[list[float]], limits: list[int], costs: CostTable, load: Load) -> float:
    """The best expected tokens per second over every number of nodes."""
    together = sorted((s for line, most in zip(survival, limits, strict=True) for s in line[:most]), reverse=True)
    together = together[: load.max_nodes]
    return max(rate(together[:count], len(survival), costs, load) for count in range(len(together) + 1))


def rate(chosen: list[float], batch: int, costs: CostTable, load: Load) -> float:
    rows = torch.tensor([load.num_rows + len(chosen)])
    return (batch + sum(chosen)) / float(costs.verify_seconds(rows, load.context))


@pytest.mark.parametrize("seed", range(60))
def test_the_best_of_all_numbers_is_chosen(seed: int) -> None:
    rng = random.Random(seed)
    batch = rng.randrange(1, 5)
    survival, costs = random_survival(rng, batch), staircase(rng)
    limits = [rng.randrange(9) for _ in range(batch)]
    load = Load(batch + rng.choice([0, 0, 10]), context=50.0, max_nodes=rng.choice([0, 3, 100]))
    budget = CostBudget(costs).choose(candidates_of(survival), torch.tensor(limits), load)
    keep: list[int] = budget.num_keep.tolist()
    chosen = [s for line, count in zip(survival, keep, strict=True) for s in line[:count]]
    assert rate(chosen, batch, costs, load) == pytest.approx(best_rate(survival, limits, costs, load), rel=1e-5)
    assert all(count <= min(most, len(line)) for count, most, line in zip(keep, limits, survival, strict=True))
    assert sum(keep) <= load.max_nodes
    assert_reason(budget, survival, limits, load)


def assert_reason(budget: Budget, survival: list[list[float]], limits: list[int], load: Load) -> None:
    possible = load.max_nodes and any(min(most, len(line)) for most, line in zip(limits, survival, strict=True))
    expected = "cost" if budget.num_keep.any() else "does_not_pay" if possible else "no_candidates"
    assert budget.reason == expected
    assert budget.reason in REASONS


def flat(seconds_per_row: float) -> CostTable:
    rows = torch.tensor([1.0, 100.0])
    return CostTable(rows, torch.tensor([1.0]), 1 + seconds_per_row * rows[None])


def test_free_nodes_are_all_taken_and_dear_ones_not_at_all() -> None:
    survival = [[0.9, 0.5, 0.1], [0.3]]
    load = Load(2, context=10.0, max_nodes=50)
    limits = torch.tensor([9, 9])
    assert CostBudget(flat(0.0)).choose(candidates_of(survival), limits, load).num_keep.tolist() == [3, 1]
    dear = CostBudget(flat(1000.0)).choose(candidates_of(survival), limits, load)
    assert (dear.num_keep.tolist(), dear.reason) == ([0, 0], "does_not_pay")


@pytest.mark.parametrize("policy", [CostBudget(flat(0.0)), FixedBudget(8)], ids=["cost", "fixed"])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_without_candidates_nothing_is_kept(policy: CostBudget | FixedBudget, batch: int) -> None:
    load = Load(batch + 1, context=0.0, max_nodes=10)
    budget = policy.choose(DraftTree.empty(batch), torch.zeros(batch, dtype=torch.int64), load)
    assert budget.num_keep.tolist() == [0] * batch
    assert budget.reason in REASONS


@pytest.mark.parametrize(
    ("max_nodes", "keep", "reason"),
    [(50, [2, 1, 2], "fixed"), (5, [2, 1, 2], "fixed"), (4, [1, 1, 1], "slots"), (0, [0, 0, 0], "slots")],
)
def test_a_fixed_budget_obeys_limits_and_slots(max_nodes: int, keep: list[int], reason: str) -> None:
    candidates = candidates_of([[0.9, 0.8, 0.7], [0.5], [0.4, 0.3, 0.2]])
    budget = FixedBudget(2).choose(candidates, torch.tensor([9, 9, 2]), Load(3, 10.0, max_nodes))
    assert (budget.num_keep.tolist(), budget.reason) == (keep, reason)
