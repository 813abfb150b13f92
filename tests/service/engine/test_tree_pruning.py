"""Captured pruning keeps the trees, and learns the labels, of pruning as it is asked for."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from drafters.calibration import SurvivalCalibration
from drafters.tree import MAX_DEPTH, ROOT, DraftTree
from kernels.accept import accept
from kernels.graph_runner import Capture
from service.engine.tree_pruning import TreePruning
from service.engine.tree_width import FixedWidth
from tests.drafters.trees import assert_valid_tree
from tests.kernels.tensor_program import kernels, record

torch.set_num_threads(1)
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


def same(one: DraftTree, other: DraftTree) -> bool:
    """But for padding."""
    width = min(one.width, other.width)
    return all(
        torch.equal(*pair) for pair in zip(one.first(one.batch, width), other.first(other.batch, width), strict=True)
    )


class Steps:
    """A way of pruning, with a calibration of its own."""

    def __init__(self, capture: Capture | None) -> None:
        self.calibration = SurvivalCalibration()
        self.pruning = TreePruning(self.calibration, capture=capture, max_batch=BATCH, width=FixedWidth(WIDTH))

    def step(self, seed: int) -> tuple[DraftTree, DraftTree]:
        """Candidates of chance pruned to sizes of chance, and learnt from. # -> corrected, kept"""
        generator = torch.Generator().manual_seed(seed)
        batch, width = (int(torch.randint(1, most + 1, (), generator=generator)) for most in (BATCH + 1, WIDTH + 1))
        raw = random_trees(batch, width, generator)
        deepest, wished = (torch.randint(most, (batch,), generator=generator) for most in (MAX_DEPTH, 2 * WIDTH))
        corrected, limits = self.pruning.correct(raw, deepest, wished)
        limits = limits.clone()
        assert torch.equal(limits, torch.minimum(wished, (corrected.survival > 0).sum(1)))
        rises = torch.rand(3, generator=generator)
        seconds = torch.cat([torch.ones(1), 1.0 + rises.cumsum(0) * 0.5])
        seconds[1 + seed % 4 :] = float("inf")
        num_keep = self.pruning.share(corrected, limits, seconds, 0.5 + torch.rand(batch, generator=generator))
        assert (num_keep <= limits).all()
        corrected = DraftTree(*(value.clone() for value in corrected))
        width = (7, 15, WIDTH)[seed % 3]  # of some trees not all nodes fit
        wanted, num_keep = num_keep.tolist(), (num_keep, limits)[seed % 2]
        tree, sizes = self.pruning.keep(num_keep, torch.tensor(wanted), width)
        assert sizes[:, 0].tolist() == wanted
        assert sizes[:, 1].tolist() == num_keep.clamp(max=width).tolist()
        assert torch.equal(sizes[:, 2], (corrected.survival > 0).sum(1))
        kept = DraftTree(*(value.clone() for value in tree)).first(batch, corrected.width)  # without padding
        assert torch.equal(kept.num_nodes, num_keep.clamp(max=width))
        if kept.width:
            self.pruning.learn(*committed(kept, generator))
        if seed % 7 == 0:
            self.calibration.renew()
        return corrected, kept


@pytest.fixture(autouse=True)
def _captured_ops() -> Iterator[None]:
    """What is compiled for this processor cannot be recorded."""
    with kernels():
        yield


@pytest.fixture
def both() -> tuple[Steps, Steps]:
    return Steps(None), Steps(record)


def test_captured_pruning_keeps_and_learns_the_same(both: tuple[Steps, Steps]) -> None:
    eager, captured = both
    for seed in range(150):
        (corrected, kept), (corrected_too, kept_too) = eager.step(seed), captured.step(seed)
        assert_valid_tree(kept_too)
        assert same(kept, kept_too)
        assert torch.equal(corrected.survival, corrected_too.survival)
        assert torch.equal(corrected.num_nodes, corrected_too.num_nodes)
    assert eager.calibration.error() == captured.calibration.error() > 0


def test_more_than_was_captured_is_pruned_as_it_is() -> None:
    captured = Steps(record)
    generator = torch.Generator().manual_seed(0)
    for batch, width in ((BATCH + 1, WIDTH), (2, WIDTH + 1), (2, 0)):
        raw = random_trees(batch, width, generator)
        corrected, _ = captured.pruning.correct(raw, torch.full((batch,), MAX_DEPTH), torch.full((batch,), WIDTH))
        assert corrected.tokens.shape == (batch, width)
        tree, _ = captured.pruning.keep(corrected.num_nodes, corrected.num_nodes, width)
        assert tree.num_nodes.tolist() == raw.num_nodes.tolist()


def test_captured_candidates_are_padded_with_roots_children() -> None:
    pruning, raw = Steps(record).pruning, random_trees(2, 9, torch.Generator().manual_seed(1))
    pruning.correct(raw, torch.full((2,), MAX_DEPTH), torch.full((2,), WIDTH))
    parents = pruning._corrected.trees.parents
    assert parents.shape == (2, WIDTH)
    assert (parents[:, 9:] == ROOT).all()


def test_a_captured_capture_learns_nothing_before_it_is_asked() -> None:
    fresh, captured = SurvivalCalibration(), Steps(record).calibration
    raw = random_trees(3, 9, torch.Generator().manual_seed(1))
    deepest = torch.full((3,), MAX_DEPTH)
    assert torch.equal(fresh.correct(raw, deepest).survival, captured.correct(raw, deepest).survival)
    assert captured.error() == 0.0
