"""Captured pruning keeps the trees, and learns the labels, of pruning as it is asked for."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from drafters.calibration import SurvivalCalibration
from drafters.tree import MAX_DEPTH, ROOT, DraftTree
from kernels.graph_runner import Capture
from kernels.settle import accept
from service.engine.tree_pruning import TreePruning, TreeWidth
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
