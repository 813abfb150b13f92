"""Rows for more nodes than there are change no text, and a width follows from the trees of the step before."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from drafters.calibration import SurvivalCalibration
from drafters.decision import RegretLedger
from drafters.protocol import DraftingSizes
from drafters.tree import MAX_DEPTH, ROOT, DraftTree
from kernels.graph_runner import Capture
from kernels.settle import accept
from kernels.survival import allocate_width
from service.engine.budget import CostBudget, FixedBudget
from service.engine.costs import FREE
from service.engine.engine import EngineLimits
from service.engine.requests import SamplingParams
from service.engine.tree_pruning import TreePruning, TreeWidth
from tests.drafters.trees import assert_valid_tree
from tests.kernels.tensor_program import kernels, record
from tests.random_tree import RandomTreeDrafter
from tests.service.engine.harness import generate, greedy, load_of, request, sampled, tiny_engine
from tests.service.engine.test_budget import candidates_of, table
from tests.tiny_models import VOCAB_SIZE, random_prompts

SIZES = EngineLimits(max_model_len=120, max_sequences=4, prefill_chunk=16, max_budget=20)


def test_a_fixed_width_holds_the_widest_tree_of_the_step_before() -> None:
    width, candidates = TreeWidth(48, captured=True), candidates_of([[0.5], [0.5]])
    assert width.choose(candidates, 1000, 48) == 7, "the first trees are the least"
    for wanted, given in ((7, 7), (8, 15), (1, 7), (40, 48), (31, 31), (0, 7)):
        width.learn([0, wanted])
        assert width.choose(candidates, 1000, 48) == given
        assert width.node_rows(torch.zeros(2, 3), given) == [given, given]


def test_a_fixed_width_fits_into_the_free_slots() -> None:
    width, candidates = TreeWidth(48, captured=True), candidates_of([[0.5], [0.5]])
    width.learn([48])
    assert width.choose(candidates, 1000, 48) == 48
    assert width.choose(candidates, 40, 48) == 15
    assert width.choose(candidates, 1000, 15) == 15
    assert width.choose(candidates, 1000, 5) == 7


@pytest.mark.parametrize(("free", "has_room"), [(14, True), (13, False)])
def test_no_drafter_is_asked_without_room_for_the_smallest_trees(free: int, has_room: bool) -> None:
    load = load_of(2, free_slots=free, tree_widths=TreeWidth(48, captured=True).choices)
    assert load.obstacle == (None if has_room else "slots")


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


def test_the_width_of_most_tokens_per_second_is_chosen() -> None:
    for seed in range(40):
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
    assert width.choose(candidates, load.free_slots, 31) == 7
    assert batch * 8 == 128, "the rows that were priced are those that run"


# Captured pruning keeps the trees, and learns the labels, of pruning as it is asked for.

BATCH, WIDTH = 6, 20


def random_trees(batch: int, width: int, generator: torch.Generator) -> DraftTree:
    """Trees of any number of nodes whose survival falls along every path, ties among them."""
    if not width:
        return DraftTree.empty(batch)
    parents = torch.stack([torch.randint(ROOT, i, (batch,), generator=generator) for i in range(width)], 1)
    tree = DraftTree.of(torch.randperm(width, generator=generator).repeat(batch, 1), parents)
    survival = torch.zeros(batch, width)
    for i in range(width):
        above = torch.where(parents[:, i] < 0, 1.0, survival.gather(1, parents[:, i : i + 1].clamp(min=0))[:, 0])
        survival[:, i] = above * (torch.randint(1, 5, (batch,), generator=generator) / 4)
    num_nodes = torch.randint(width + 1, (batch,), generator=generator)
    valid = torch.arange(width) < num_nodes[:, None]
    nodes = (tree.tokens * valid, torch.where(valid, parents, ROOT), tree.depths * valid, survival * valid)
    return DraftTree(*nodes, num_nodes)


def committed(tree: DraftTree, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """What a target says that agrees with half of the nodes, in as many columns as the walk has and one more.
    # [batch, depth + 1], [batch]"""
    after = torch.full((tree.batch, tree.width + 1), -1)
    agrees = torch.rand(tree.tokens.shape, generator=generator) < 0.5
    for line, node in (tree.valid & agrees).nonzero().tolist():
        after[line, tree.parents[line, node] + 1] = tree.tokens[line, node]
    found = accept(tree.tokens, tree.parents, tree.num_nodes, after)
    accepted = tree.tokens.gather(1, found.path.clamp(min=0)).masked_fill(found.path < 0, -1)
    return torch.cat([accepted, torch.full((tree.batch, 1), -1)], 1), found.num_accepted + 1


class Steps:
    """A way of pruning, with a calibration of its own."""

    def __init__(self, capture: Capture | None, *, is_priced: bool = True) -> None:
        self.calibration, self.is_priced, width = SurvivalCalibration(), is_priced, TreeWidth(WIDTH, captured=True)
        self.pruning = TreePruning(self.calibration, capture=capture, max_batch=BATCH, width=width, is_priced=is_priced)

    def step(self, seed: int) -> tuple[DraftTree, list[list[int]]]:
        """Candidates of chance pruned to sizes of chance, and learnt from. # -> kept, sizes"""
        generator = torch.Generator().manual_seed(seed)
        batch, width = (int(torch.randint(1, most + 1, (), generator=generator)) for most in (BATCH + 1, WIDTH + 1))
        raw = random_trees(batch, width, generator)
        deepest, wished = (torch.randint(most, (batch,), generator=generator) for most in (MAX_DEPTH, 2 * WIDTH))
        rises = torch.rand(3, generator=generator)
        seconds = torch.cat([torch.ones(1), 1.0 + rises.cumsum(0) * 0.5])
        seconds[1 + seed % 4 :] = float("inf")
        seconds = seconds if self.is_priced else seconds[:0]
        weights = 0.5 + torch.rand(batch, generator=generator)
        most = (7, 15, WIDTH)[seed % 3]  # of some trees not all nodes fit
        trees, sizes = self.pruning.prune(raw, deepest, wished, seconds, weights, most)
        wanted, kept, worth = sizes.unbind(1)
        assert (wanted <= torch.minimum(wished, worth)).all()
        assert torch.equal(kept, torch.minimum(wished, worth).clamp(max=most))
        tree = DraftTree(*(value.clone() for value in trees.first(batch, min(most, width))))  # without padding
        assert torch.equal(tree.num_nodes, kept)
        if tree.width:
            self.pruning.learn(*committed(tree, generator))
        if seed % 7 == 0:
            self.calibration.on_weights_changed()
        return tree, sizes.tolist()


@pytest.fixture(autouse=True)
def _captured_ops() -> Iterator[None]:
    """What is compiled for this processor cannot be recorded."""
    with kernels():
        yield


@pytest.mark.parametrize("is_priced", [True, False])
def test_captured_pruning_keeps_and_learns_the_same(is_priced: bool) -> None:
    eager, captured = (Steps(capture, is_priced=is_priced) for capture in (None, record))
    for seed in range(150):
        (kept, sizes), (kept_too, sizes_too) = eager.step(seed), captured.step(seed)
        assert_valid_tree(kept_too)
        assert all(map(torch.equal, kept, kept_too))
        assert sizes == sizes_too
    assert eager.calibration.error() == captured.calibration.error() > 0


def prune(pruning: TreePruning, raw: DraftTree, width: int) -> DraftTree:
    """All nodes that fit."""
    batch = raw.batch
    most = torch.full((batch,), MAX_DEPTH), torch.full((batch,), WIDTH + 1)
    return pruning.prune(raw, *most, torch.ones(4), torch.ones(batch), width)[0]


def test_more_than_was_captured_is_pruned_as_it_is() -> None:
    captured = Steps(record)
    generator = torch.Generator().manual_seed(0)
    for batch, width in ((BATCH + 1, WIDTH), (2, WIDTH + 1), (2, 0)):
        raw = random_trees(batch, width, generator)
        tree = prune(captured.pruning, raw, width).first(batch, width)
        assert tree.tokens.shape == (batch, width)
        assert tree.num_nodes.tolist() == raw.num_nodes.tolist()


def test_captured_trees_are_padded_with_roots_children() -> None:
    trees = prune(Steps(record).pruning, random_trees(2, 9, torch.Generator().manual_seed(1)), WIDTH)
    assert trees.parents.shape == (2, WIDTH)
    assert (trees.parents[:, 9:] == ROOT).all()


def test_a_captured_capture_learns_nothing_before_it_is_asked() -> None:
    fresh, captured = SurvivalCalibration(), Steps(record).calibration
    assert torch.equal(fresh.rates, captured.rates)
    assert captured.error() == 0.0
