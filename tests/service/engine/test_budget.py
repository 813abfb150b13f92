"""The budget against brute force: every number of nodes is looked at, and no limit is broken."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from drafters.decision import RegretLedger
from drafters.tree import Candidates, DraftTree
from kernels.survival import allocate_nodes
from service.engine.budget import CostBudget, FixedBudget, StepLoad
from service.engine.costs import FREE, CostTable, DraftCosts
from service.engine.drafting import pace_weights
from service.engine.sequence import Sequence
from tests.service.engine.harness import budget_of, load_of, step_stats
from tests.service.engine.test_scheduler import sequence_of


def candidates_of(survival: list[list[float]]) -> Candidates:
    """Chains whose nodes have these survivals, falling."""
    width = max((len(line) for line in survival), default=0)
    padded = torch.tensor([line + [0.0] * (width - len(line)) for line in survival]).view(len(survival), width)
    counts = torch.tensor([len(line) for line in survival], dtype=torch.int64)
    nodes = torch.arange(width).expand(len(survival), width)
    valid = nodes < counts[:, None]
    return DraftTree(nodes * valid, torch.where(valid, nodes - 1, -1), (nodes + 1) * valid, padded, counts)


def table(rows: list[float], seconds: list[float]) -> CostTable:
    """Whatever the context and the number of sequences."""
    return CostTable(
        sequences=np.array([1.0]), contexts=np.array([1.0]), rows=np.array(rows), seconds=np.array([[seconds]])
    )


def staircase(rng: random.Random) -> CostTable:
    rows = [1.0, 2.0, 3.0, 8.0, 9.0, 16.0, 17.0, 60.0]
    return table(rows, sorted(rng.choice([1.0, 1.5, 2.0, 3.0, 5.0]) for _ in rows))


def random_survival(rng: random.Random, batch: int) -> list[list[float]]:
    return [sorted((rng.random() for _ in range(rng.randrange(9))), reverse=True) for _ in range(batch)]


def best_rate(survival: list[list[float]], limits: list[int], costs: CostTable, load: StepLoad) -> float:
    """The best expected tokens per second over every number of nodes."""
    together = sorted((s for line, most in zip(survival, limits, strict=True) for s in line[:most]), reverse=True)
    together = together[: load.free_slots]
    return max(rate(together[:count], len(survival), costs, load) for count in range(len(together) + 1))


def rate(chosen: list[float], batch: int, costs: CostTable, load: StepLoad) -> float:
    """Prompt rows of the step are paid for anyway."""
    rows = np.array([batch, load.num_rows, load.num_rows + len(chosen)], dtype=np.float64)
    plain, certain, whole = costs.verify_seconds(rows, load.context)
    return (batch + sum(chosen)) / float(plain + whole - certain)


def by_cost(costs: CostTable) -> CostBudget:
    return CostBudget(costs, FREE, RegretLedger())


def nodes_of(
    policy: CostBudget, candidates: Candidates, limits: Tensor, load: StepLoad, weights: Tensor | None = None
) -> list[int]:
    """Nodes of each sequence by the policy's prices."""
    seconds = torch.tensor(policy.step_seconds(load, candidates.tokens.numel()), dtype=torch.float32)
    weights = torch.ones(candidates.batch) if weights is None else weights
    nodes: list[int] = allocate_nodes(candidates, limits, seconds, weights).tolist()
    return nodes


def test_the_best_of_all_numbers_is_chosen() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        batch = rng.randrange(1, 5)
        survival, costs = random_survival(rng, batch), staircase(rng)
        limits = [rng.randrange(9) for _ in range(batch)]
        load = load_of(batch, prompt_rows=rng.choice([0, 0, 10]), context=50.0, free_slots=rng.choice([0, 3, 100]))
        keep = nodes_of(by_cost(costs), candidates_of(survival), torch.tensor(limits), load)
        best = best_rate(survival, limits, costs, load)
        together = sorted((s for line, most in zip(survival, limits, strict=True) for s in line[:most]), reverse=True)
        assert rate(together[: sum(keep)], batch, costs, load) == pytest.approx(best, rel=1e-5)
        if sum(keep) <= batch:  # more nodes than sequences leave a node for everybody, at some cost
            chosen = [s for line, count in zip(survival, keep, strict=True) for s in line[:count]]
            assert rate(chosen, batch, costs, load) == pytest.approx(best, rel=1e-5)
        assert all(count <= min(most, len(line)) for count, most, line in zip(keep, limits, survival, strict=True))
        assert sum(keep) <= load.free_slots


def test_no_one_goes_without_a_tree_where_there_is_room_for_all() -> None:
    survival = [[0.9, 0.8, 0.7, 0.6], [0.4, 0.3], [], [0.35]]
    costs = table([1.0, 9.0, 10.0, 100.0], [1.0, 1.0, 50.0, 5000.0])
    candidates, limits = candidates_of(survival), torch.full((4,), 9)
    assert nodes_of(by_cost(costs), candidates, limits, load_of(4)) == [3, 1, 0, 1]  # and not [4, 1, 0, 0]
    lone = by_cost(table([1.0, 5.0, 6.0, 100.0], [1.0, 1.0, 50.0, 5000.0]))
    few = nodes_of(lone, candidates, limits, load_of(4))
    assert few == [1, 0, 0, 0]  # fewer nodes than sequences: the likeliest


def test_a_late_sequence_gets_more() -> None:
    candidates = candidates_of([[0.6, 0.5, 0.4], [0.6, 0.5, 0.4]])
    costs = table([1.0, 4.0, 5.0, 100.0], [1.0, 1.0, 50.0, 5000.0])
    limits, load = torch.tensor([9, 9]), load_of(2)
    assert nodes_of(by_cost(costs), candidates, limits, load) == [1, 1]
    assert nodes_of(by_cost(costs), candidates, limits, load, torch.tensor([1.0, 3.0])) == [0, 2]


@pytest.mark.parametrize(("num_drafting", "nodes"), [(1, 1), (0, 0)])
def test_drafting_seconds_count_where_the_drafter_runs(num_drafting: int, nodes: int) -> None:
    """A node that does not pay by itself, but once a step takes long anyway."""
    drafts = DraftCosts(batches=np.ones(1), seconds=np.array([3.0]))
    policy = CostBudget(table([1.0, 2.0], [1.0, 2.5]), drafts, RegretLedger())
    load = load_of(1, num_drafting=num_drafting)
    assert nodes_of(policy, candidates_of([[0.9]]), torch.tensor([1]), load) == [nodes]


@pytest.mark.parametrize("nodes", [3, 0])
def test_a_fixed_number_of_nodes_is_obeyed(nodes: int) -> None:
    load = load_of(2)
    budget = FixedBudget(nodes).decide(load, starts=False)
    found = budget.max_nodes, budget.drafted, budget.reason, budget.followed
    assert found == (nodes, nodes > 0, "fixed", nodes > 0)
    assert not budget.seconds(load, 8)


def generating(tokens: int, first_token_seconds: float | None) -> Sequence:
    sequence = sequence_of(4)
    sequence.tokens = [2] * (4 + tokens)
    sequence.first_token_seconds = first_token_seconds
    return sequence


def test_those_behind_their_pace_count_more() -> None:
    sequences = [
        generating(0, None),  # still reads its prompt
        generating(100, 5.0),  # twice as fast as promised
        generating(10, 8.0),  # due after 1 s, and 2 s have passed
        generating(2, 0.0),  # hopelessly late
    ]
    weights = pace_weights(sequences, 0.1, 10.0, torch.device("cpu"))
    assert weights.tolist() == [1.0, 1.0, 2.0, 4.0]


def test_captured_widths_are_bounded_by_what_drafts_brought() -> None:
    """A width that takes longer than the most tokens that drafts may bring are worth is not laid out, the least one
    neither; the bound loosens while nothing is drafted."""
    policy = CostBudget(table([4.0, 32.0, 64.0, 128.0], [1.0, 2.0, 4.0, 8.0]), FREE, RegretLedger())
    load = load_of(4, free_slots=1000, tree_widths=(0, 7, 15, 31))
    assert policy.decide(load, starts=True).max_nodes == 15
    for _ in range(40):
        policy.learn(budget_of(load, [7] * 4), step_stats(28, 0, accepted_per_sequence=(0,) * 4, verify_seconds=1.0))
    reasons = list[str]()
    while not reasons or reasons[-1] == "does_not_pay":
        policy.gate = CostBudget(table([1.0], [1.0]), FREE, RegretLedger()).gate  # as if the steps had not lost
        budget = policy.decide(load, starts=True)
        reasons.append(budget.reason)
        assert len(reasons) < 20_000
        assert not budget.drafted
    assert reasons[-1] == "reference", "drafting is tried again, as soon as a plain step is known"
    assert len(reasons) > 10, len(reasons)
