"""Counts of what followed contexts, joint trees and what is learnt of them by all kernels, against the references."""

import random

import pytest
import torch
from torch.utils import _pytree as pytree

from kernels.memory import PREDICTION, TEXT, Memory
from kernels.ops import REFERENCE, Ops
from kernels.trees import ROOT, DraftTree
from tests.kernels.test_memory import LEAST, RATE, network_of, trusting

Everywhere = tuple[Ops, str]
ROWS, SCOPES, NODES, BUCKETS = 5, 2, 5, 4
PADDING = ROWS - 1  # the row that fills up batches, which has no parts


def memory_of(buckets: int = BUCKETS, proposed: int = NODES) -> Memory:
    """Rows that share two scopes, with room for as many nodes of a network's tree."""
    memory = trusting(Memory.empty(ROWS, (2 * ROWS + SCOPES) * buckets, SCOPES, proposed))
    for row in range(PADDING):
        lines = 2 * row, 2 * row + 1, 2 * ROWS + row % SCOPES
        memory.parts[row] = torch.tensor([[line * buckets, buckets] for line in lines])
        memory.scopes[row] = row % SCOPES
    return memory


def copy_of(memory: Memory, device: str) -> Memory:
    """The same on another device, with tensors of its own."""
    copied: Memory = pytree.tree_map(lambda part: part.to(device, copy=True), memory)
    return copied


def assert_same_trees(found: DraftTree, expected: DraftTree) -> None:
    """Padding included."""
    for name in ("tokens", "parents", "depths", "num_nodes"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    torch.testing.assert_close(found.survival.cpu(), expected.survival, rtol=1e-5, atol=1e-6)


def assert_remembers(found: Memory, expected: Memory) -> None:
    """Integers are equal, and weights to rounding."""
    for name in ("entries", "tails", "predicted"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    for mine, theirs in ((found.alone, expected.alone), (found.network, expected.network)):
        assert torch.equal(mine.num_nodes.cpu(), theirs.num_nodes)
    for name in ("weights", "squares"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("length", "buckets"), [(1, 4), (40, 4), (40, 1)])
def test_texts_are_counted(length: int, buckets: int, everywhere: Everywhere) -> None:
    """Of few tokens, so that buckets fill, and orders and programs come to the same ones."""
    kernels, device = everywhere
    generator = torch.Generator().manual_seed(length)
    expected = memory_of(buckets)
    found = copy_of(expected, device)
    for row, part in ((1, TEXT), (1, PREDICTION), (1, TEXT), (PADDING, TEXT)):
        tokens = torch.randint(9, (length,), generator=generator)
        REFERENCE.add_text(expected, row, part, tokens)
        kernels.add_text(found, row, part, tokens.to(device))
        length = min(length, 3)
    assert_remembers(found, expected)
    assert expected.entries.any()


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_trees_are_grown_and_learnt_from(batch: int, everywhere: Everywhere) -> None:
    """With a row of padding; in one step from texts alone, in the next with a network; some texts are drawn."""
    kernels, device = everywhere
    rng, expected = random.Random(batch), memory_of()
    for row in range(PADDING):
        text = torch.tensor([rng.randrange(6) for _ in range(12 + 6 * row)])
        REFERENCE.add_text(expected, row, TEXT, text)
        REFERENCE.add_text(expected, row, PREDICTION, text[: 5 * row])
    found = copy_of(expected, device)
    is_interpreted = "triton" in kernels.grow_joint_tree.__module__  # and slow
    for with_network in (False, True) * (1 if is_interpreted else 6):
        rows = torch.tensor([*rng.sample(range(PADDING), batch), PADDING])
        tokens = torch.tensor([[rng.randrange(6) for _ in range(2)] for _ in rows])
        counts = torch.tensor([*(rng.randrange(1, 3) for _ in range(batch)), 0])
        network = network_of(rng, len(rows)).first(len(rows), NODES)
        network.num_nodes[:] = torch.tensor([network.width] * batch + [0])
        verified = network_of(rng, len(rows)).first(len(rows), 4)
        verified.num_nodes[:] = torch.tensor([*(verified.width - line % 2 for line in range(batch)), 0])
        choices = torch.tensor([[rng.randrange(6) for _ in range(verified.width + 1)] for _ in rows])
        choices[:, 0] = verified.tokens[:, 0]  # is accepted: nothing is counted after it
        for memory in (expected, found):
            drawn = random.Random(batch + with_network)
            for values in (memory.warm, memory.stores):
                values.copy_(torch.tensor([drawn.random() < 0.6 for _ in range(ROWS)]))
            for values in (memory.seeds, memory.roots):
                values.copy_(torch.tensor([drawn.randrange(1 << 62) for _ in range(ROWS)]))
        given = rows.to(device), tokens.to(device), counts.to(device)
        tree = REFERENCE.grow_joint_tree(expected, rows, network if with_network else None, NODES, LEAST)
        proposed = network.to(torch.device(device)) if with_network else None
        assert_same_trees(kernels.grow_joint_tree(found, given[0], proposed, NODES, LEAST), tree)
        assert tree.num_nodes.any()
        outcome = REFERENCE.learn_committed(expected, rows, tokens, counts, verified, choices, RATE)
        asked = verified.to(torch.device(device)), choices.to(device)
        assert torch.equal(kernels.learn_committed(found, *given, *asked, RATE).cpu(), outcome)
        assert_remembers(found, expected)


def test_a_network_of_many_nodes(everywhere: Everywhere) -> None:
    """More than come in one round, and more children than a tree has room for."""
    kernels, device = everywhere
    parents = torch.tensor([[ROOT] * 40 + [0] * 5])
    survival = torch.linspace(0.9, 0.1, parents.shape[1])[None]
    network = DraftTree.of(torch.arange(parents.shape[1])[None], parents)._replace(survival=survival)
    expected = memory_of(proposed=network.width)
    REFERENCE.add_text(expected, 2, TEXT, torch.tensor([3, 36, 3, 41, 3]))
    found, row = copy_of(expected, device), torch.tensor([2])
    tree = REFERENCE.grow_joint_tree(expected, row, network, NODES, LEAST)
    same = kernels.grow_joint_tree(found, row.to(device), network.to(torch.device(device)), NODES, LEAST)
    assert_same_trees(same, tree)
    assert_same_trees(found.network, expected.network)
    said, nodes = (torch.tensor([[36]]), torch.tensor([1])), DraftTree.empty(1)
    REFERENCE.learn_committed(expected, row, *said, nodes, said[0], RATE)
    tokens, counts = (value.to(device) for value in said)
    kernels.learn_committed(found, row.to(device), tokens, counts, nodes.to(torch.device(device)), tokens, RATE)
    assert_remembers(found, expected)


def test_a_token_that_several_nodes_claim_at_a_depth_is_one_candidate(everywhere: Everywhere) -> None:
    """After 7, which the network does not propose, and with chances that are all the same."""
    kernels, device = everywhere
    network = DraftTree.of(torch.tensor([[1, 2, 5, 5]]), torch.tensor([[ROOT, ROOT, 0, 1]]))
    network = network._replace(survival=torch.tensor([[0.6, 0.4, 0.5, 0.2]]))
    expected, row = memory_of(proposed=8), torch.tensor([0])
    expected.weights.zero_()
    REFERENCE.add_text(expected, 0, TEXT, torch.tensor([3, 7, 3]))
    found = copy_of(expected, device)
    tree = REFERENCE.grow_joint_tree(expected, row, network, 8, 0.2)
    same = kernels.grow_joint_tree(found, row.to(device), network.to(torch.device(device)), 8, 0.2)
    assert_same_trees(same, tree)
    assert sorted(tree.tokens[0].tolist()) == [0, 1, 2, 3, 5, 5, 5, 7]
