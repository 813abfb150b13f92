"""Ops on trees by the device kernels, against the references."""

import pytest
import torch
from torch import Tensor

from kernels import survival
from kernels.ops import REFERENCE
from kernels.survival import CLAIMS, DEPTHS
from kernels.tree_attention import MAX_DEPTH
from kernels.trees import ROOT, DraftTree
from kernels.triton.trees import ancestor_matrix, correct_survival, fates


def trees(batch: int, nodes: int, seed: int) -> DraftTree:
    """Of few tokens, so that texts have some of them; the last tree is padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, (batch, nodes), generator=generator)
    parents = (torch.rand(batch, nodes, generator=generator) * (torch.arange(nodes) + 1)).long() + ROOT
    tree = DraftTree.of(tokens, parents)
    survival = torch.rand(batch, nodes, generator=generator) ** tree.depths
    exists = (torch.arange(batch) < batch - 1)[:, None]
    parents = torch.where(exists, parents, ROOT)
    return DraftTree(tokens * exists, parents, tree.depths * exists, survival * exists, tree.num_nodes * exists[:, 0])


def text(batch: int, longest: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, longest + 1, (batch,), generator=generator)
    tokens = torch.randint(3, (batch, longest), generator=generator)
    return tokens.where(torch.arange(longest) < counts[:, None], -1), counts


SIZES = pytest.mark.parametrize(("batch", "nodes"), [(2, 1), (3, 9), (5, 64), (2, 100)])


@SIZES
@pytest.mark.parametrize("longest", [1, 4, 20])
def test_fates(batch: int, nodes: int, longest: int, device: str) -> None:
    tree, (committed, counts) = trees(batch, nodes, nodes), text(batch, longest, nodes)
    committed[0, 0] = tree.tokens[0, 0]
    asked = tree.tokens, tree.parents, tree.depths, committed, counts
    expected, found = REFERENCE.fates(*asked), fates(*(value.to(device) for value in asked))
    assert all(torch.equal(*pair) for pair in zip(expected, map(Tensor.cpu, found), strict=True))
    assert expected.came_true.any()


def test_one_tree_for_all_texts(device: str) -> None:
    """As of a drafter whose parents and depths are the same in every line."""
    tree, (committed, counts) = trees(3, 30, 1), text(3, 6, 1)
    parents, depths = (values[:1].expand(3, -1) for values in (tree.parents, tree.depths))
    expected = REFERENCE.fates(tree.tokens, parents, depths, committed, counts)
    on_device = (value.to(device) for value in (tree.parents, tree.depths))
    parents, depths = (values[:1].expand(3, -1) for values in on_device)
    found = fates(tree.tokens.to(device), parents, depths, committed.to(device), counts.to(device))
    assert all(torch.equal(*pair) for pair in zip(expected, map(Tensor.cpu, found), strict=True))


@SIZES
def test_ancestors(batch: int, nodes: int, device: str) -> None:
    parents = trees(batch, nodes, nodes).parents
    assert torch.equal(ancestor_matrix(parents.to(device)).cpu(), REFERENCE.ancestor_matrix(parents))


def test_the_deepest_chain_is_seen_whole(device: str) -> None:
    parents = torch.arange(MAX_DEPTH)[None] - 1
    assert torch.equal(ancestor_matrix(parents.to(device)).cpu(), torch.ones(1, MAX_DEPTH, MAX_DEPTH).tril().bool())
    tree = DraftTree.of(torch.zeros_like(parents), parents)
    counts = torch.tensor([MAX_DEPTH])
    asked = tree.tokens, tree.parents, tree.depths, torch.zeros_like(parents), counts
    assert fates(*(value.to(device) for value in asked)).came_true.all()


@SIZES
@pytest.mark.parametrize("deepest", [0, 2, 64])
def test_survival_is_corrected(batch: int, nodes: int, deepest: int, device: str) -> None:
    tree = trees(batch, nodes, nodes)
    rates = 2 * torch.rand(DEPTHS * CLAIMS, generator=torch.Generator().manual_seed(nodes))
    ends = torch.full((batch,), deepest)
    expected = survival.correct_survival(tree, ends, rates)
    found = correct_survival(tree.to(torch.device(device)), ends.to(device), rates.to(device))
    torch.testing.assert_close(found.survival.cpu(), expected.survival)
    torch.testing.assert_close(found.conditional.cpu(), expected.conditional)
    assert torch.equal(found.buckets.cpu(), expected.buckets)


def test_claims_that_are_no_numbers_have_a_bucket(device: str) -> None:
    tree = trees(2, 9, 5)
    tree = tree._replace(survival=torch.full_like(tree.survival, torch.nan))
    rates = torch.ones(DEPTHS * CLAIMS, device=device)
    buckets = correct_survival(tree.to(torch.device(device)), torch.tensor([9, 9], device=device), rates).buckets
    assert ((buckets >= 0) & (buckets < DEPTHS * CLAIMS)).all()
