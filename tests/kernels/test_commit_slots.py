"""Slots after a verify, in the reference and on the device, against lists."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import settle as reference
from kernels.settle import CommittedSlots, accept
from kernels.tree_attention import NULL_SLOT
from kernels.triton import settle as on_device
from tests.kernels.random_walks import Tree, batch_of

LENGTH = 90
Commit = Callable[..., CommittedSlots]


@pytest.fixture(params=[reference.commit_slots, on_device.commit_slots], ids=["reference", "triton"])
def commit_slots(request: pytest.FixtureRequest) -> Commit:
    chosen: Commit = request.param
    return chosen


@pytest.mark.parametrize(("batch", "most"), [(1, 1), (3, 5), (8, 24), (64, 3), (2, 64), (3, 256)])
def test_accepted_slots_are_kept_and_the_others_freed(batch: int, most: int, commit_slots: Commit, device: str) -> None:
    rng = random.Random(batch + most)
    trees = [Tree.draw(rng, most), *(Tree.draw(rng, rng.randrange(most + 1)) for _ in range(batch - 1))]
    tokens, parents, num_nodes, targets = batch_of(trees, most)
    path, num_accepted, _ = accept(tokens, parents, num_nodes, targets)
    slots = 1 + torch.tensor(rng.sample(range(10_000), batch * most)).view(batch, most)
    lines = torch.tensor(rng.sample(range(batch + 3), batch))
    extend_end = torch.tensor([rng.randrange(LENGTH - len(tree.walk())) for tree in trees])
    table = torch.randint(20_000, 30_000, (batch + 3, LENGTH), generator=torch.Generator().manual_seed(0))
    expected = table.clone()
    for tree, own, line, end in zip(trees, slots.tolist(), lines.tolist(), extend_end.tolist(), strict=True):
        expected[line, end + 1 : end + 1 + len(tree.walk())] = torch.tensor([own[node] for node in tree.walk()])
    on = [value.to(device) for value in (path, num_accepted, num_nodes, slots, lines, extend_end, table)]
    committed = commit_slots(*on)
    assert torch.equal(on[-1].cpu(), expected)
    assert committed.path.tolist() == _path_slots(trees, slots, path.shape[1])
    rejected = [
        own[node]
        for tree, own in zip(trees, slots.tolist(), strict=True)
        for node in range(len(tree.tokens))
        if node not in tree.walk()
    ]
    assert committed.freed.tolist() == rejected + [NULL_SLOT] * (batch * most - len(rejected))


def _path_slots(trees: list[Tree], slots: Tensor, depth: int) -> list[list[int]]:
    kept = [[own[node] for node in tree.walk()] for tree, own in zip(trees, slots.tolist(), strict=True)]
    return [row + [NULL_SLOT] * (depth - len(row)) for row in kept]


def test_zero_nodes_change_nothing(commit_slots: Commit, device: str) -> None:
    none, zeros = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    table = torch.arange(20).view(2, 10)
    inputs = [v.to(device) for v in (none, zeros, zeros, none, torch.tensor([0, 1]), torch.tensor([3, 9]), table)]
    committed = commit_slots(*inputs)
    assert torch.equal(inputs[-1].cpu(), torch.arange(20).view(2, 10))
    assert committed.path.shape == (2, 0)
    assert committed.freed.shape == (0,)
