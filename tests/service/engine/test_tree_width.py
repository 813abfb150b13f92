"""Rows for more nodes than there are change no text, and a width follows from the trees of the step before."""

import random

import pytest
import torch

from drafters.protocol import DraftingSizes
from drafters.random_tree import RandomTreeDrafter
from drafters.regret import RegretLedger
from kernels.survival import allocate_width
from service.engine.budget import CostBudget, FixedBudget
from service.engine.costs import FREE
from service.engine.engine import EngineLimits
from service.engine.requests import SamplingParams
from service.engine.tree_pruning import TreeWidth
from tests.kernels.tensor_program import kernels, record
from tests.service.engine.harness import generate, greedy, load_of, request, sampled, tiny_engine
from tests.service.engine.test_budget import candidates_of, table
from tests.tiny_models import VOCAB_SIZE, random_prompts

torch.set_num_threads(1)

SIZES = EngineLimits(max_model_len=120, max_sequences=4, prefill_chunk=16, max_budget=20)


def test_a_fixed_width_holds_the_widest_tree_of_the_step_before() -> None:
    width, candidates = TreeWidth(48, captured=True), candidates_of([[0.5], [0.5]])
    assert width.choose(candidates, free_slots=1000) == 48
    for wanted, given in ((7, 7), (8, 15), (1, 7), (40, 48), (31, 31)):
        width.learn([0, wanted])
        assert width.choose(candidates, free_slots=1000) == given
        assert width.node_rows(torch.zeros(2, 3), given) == [given, given]


def test_after_a_step_that_wanted_no_nodes_there_is_room_for_some() -> None:
    width = TreeWidth(48, captured=True)
    width.learn([0, 0])
    assert width.choose(candidates_of([[0.5], [0.5]]), free_slots=1000) == 7


def test_a_fixed_width_fits_into_the_free_slots() -> None:
    assert TreeWidth(48, captured=True).choose(candidates_of([[0.5], [0.5]]), free_slots=40) == 15


@pytest.mark.parametrize(("free", "has_room"), [(14, True), (13, False)])
def test_no_drafter_is_asked_without_room_for_the_smallest_trees(free: int, has_room: bool) -> None:
    assert load_of(2, free_slots=free, tree_widths=TreeWidth(48, captured=True).choices).has_room == has_room


@pytest.mark.parametrize("params", [greedy(24), sampled(3, 24)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("nodes", "num_slots"), [(5, 600), (20, 600), (20, 230)])
def test_captured_steps_of_fixed_width_give_the_text_of_plain_ones(
    params: SamplingParams, nodes: int, num_slots: int
) -> None:
    """Prompts are read beside trees, texts come and go, and where slots are scarce some are preempted."""
    asked = [request(str(n), prompt, params) for n, prompt in enumerate(random_prompts(9, 40))]
    expected = generate(tiny_engine(drafter="none", policy=FixedBudget(0), limits=SIZES), *asked)
    with kernels():
        sizes = DraftingSizes(
            max_sequences=SIZES.max_sequences,
            max_length=SIZES.max_model_len,
            max_nodes=SIZES.max_budget,
            vocab_size=VOCAB_SIZE,
        )
        drafter = RandomTreeDrafter(sizes, seed=0, hit_rate=0.5)
        engine = tiny_engine(
            drafter=drafter, policy=FixedBudget(nodes), num_slots=num_slots, limits=SIZES, capture=record
        )
        found = generate(engine, *asked)
    assert {key: one.tokens for key, one in found.items()} == {key: one.tokens for key, one in expected.items()}
    assert sum(one.accepted for one in found.values()) > 0


def best_width(survival: list[list[float]], limits: list[int], seconds: list[float], widths: list[int]) -> list[int]:
    """By trying each width."""

    def rate(width: int, cost: float) -> float:
        kept = [sorted(line, reverse=True)[: min(limit, width)] for line, limit in zip(survival, limits, strict=True)]
        return (len(survival) + sum(map(sum, kept))) / cost

    best = max(zip(widths, seconds, strict=True), key=lambda choice: rate(*choice))[0]
    return [min(limit, best) for limit in limits]


@pytest.mark.parametrize("seed", range(40))
def test_the_width_of_most_tokens_per_second_is_chosen(seed: int) -> None:
    rng = random.Random(seed)
    batch, widths = rng.randrange(1, 5), [0, 2, 4, 8]
    survival = [sorted((rng.random() for _ in range(6)), reverse=True) for _ in range(batch)]
    limits = [rng.randrange(7) for _ in range(batch)]
    seconds = [1.0, *(1.0 + rng.random() * width for width in widths[1:])]
    found = allocate_width(
        candidates_of(survival),
        torch.tensor(limits),
        torch.tensor(seconds),
        torch.ones(batch),
        torch.tensor(widths),
    )
    assert found.tolist() == best_width(survival, limits, seconds, widths)


def test_one_sequence_does_not_widen_the_rows_of_all() -> None:
    """Of sixteen sequences one has 31 likely nodes. Rows for as many of each are priced as what they are, 512 rows."""
    batch = 16
    survival = [[0.9] * 31] + [[0.2] * 31] * (batch - 1)
    costs = table([1.0, 16.0, 128.0, 512.0], [1.0, 1.0, 1.3, 6.0])
    width = TreeWidth(31, captured=True)
    load = load_of(batch, context=50.0, free_slots=10_000, tree_widths=width.choices)
    policy = CostBudget(costs, FREE, RegretLedger())
    candidates, limits, ones = candidates_of(survival), torch.full((batch,), 31), torch.ones(batch)
    seconds = torch.tensor(policy.step_seconds(load, 31 * batch), dtype=torch.float32)
    assert width.on_device is not None
    width.learn(allocate_width(candidates, limits, seconds, ones, width.on_device).tolist())
    assert width.choose(candidates, load.free_slots) == 7
    assert batch * 8 == 128, "the rows that were priced are those that run"
