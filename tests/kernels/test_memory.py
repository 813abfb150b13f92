"""Counts of what followed contexts, and joint trees: found again, bounded, learnt."""

import random

import pytest
import torch
from torch.utils import _pytree as pytree

from kernels import ops
from kernels.memory import PREDICTION, TEXT, Memory
from kernels.ops import REFERENCE, Ops
from kernels.sample import gumbel_noise_of
from kernels.trees import ROOT, DraftTree
from tests.drafters.trees import assert_valid_tree

COMPILED = ops.on(torch.device("cpu"))
WAYS_TO_COMPUTE = {"reference": REFERENCE, "compiled": COMPILED}
ROWS, SCOPES, NODES, BUCKETS, LEAST, RATE = 3, 2, 12, 64, 0.0025, 0.1


@pytest.fixture(params=WAYS_TO_COMPUTE)
def with_(request: pytest.FixtureRequest) -> Ops:
    return WAYS_TO_COMPUTE[request.param]


def memory_of(buckets: int = BUCKETS) -> Memory:
    """Three rows with parts of their own; the first two share a scope."""
    memory = Memory.empty(ROWS, (2 * ROWS + SCOPES) * buckets, SCOPES, NODES)
    memory.scopes.copy_(torch.tensor([0, 0, 1]))
    for row in range(ROWS):
        lines = 2 * row, 2 * row + 1, 2 * ROWS + int(memory.scopes[row])
        memory.parts[row] = torch.tensor([[line * buckets, buckets] for line in lines])
    return memory


def trusting(memory: Memory) -> Memory:
    """Weights under which whatever was seen is likely, what was seen behind longer contexts most."""
    generator = torch.Generator().manual_seed(3)
    memory.weights.copy_(torch.randn(memory.weights.shape, generator=generator) * 0.5)
    return memory


def grow(with_: Ops, memory: Memory, row: int, network: DraftTree | None = None) -> DraftTree:
    return with_.grow_joint_tree(memory, torch.tensor([row]), network, NODES, LEAST)


def learn(
    with_: Ops, memory: Memory, row: int, *tokens: int, verified: DraftTree | None = None, choices: tuple[int, ...] = ()
) -> int:
    """Returns how many of the accepted ones the tree without a network had."""
    given = torch.tensor([row]), torch.tensor([tokens]), torch.tensor([len(tokens)])
    asked = verified or DraftTree.empty(1), torch.tensor([choices or (tokens[0],)])
    alone, *rest = with_.learn_committed(memory, *given, *asked, RATE).tolist()
    assert rest[:2] == [len(tokens) - 1, len(tokens)]
    return int(alone)


def below_root(tree: DraftTree) -> set[int]:
    return {token for _, token in _roots_children(tree)}


def _roots_children(tree: DraftTree) -> list[tuple[int, int]]:
    """Places and tokens."""
    return [(place, int(tree.tokens[0, place])) for place, depth in enumerate(tree.depths[0].tolist()) if depth == 1]


def test_what_a_text_has_written_is_proposed_again(with_: Ops) -> None:
    memory = trusting(memory_of())
    with_.add_text(memory, 0, TEXT, torch.tensor([5, 6, 7, 8, 5, 6]))
    tree = grow(with_, memory, 0)
    assert_valid_tree(tree)
    path = [token for _, token in sorted(zip(tree.depths[0].tolist(), tree.tokens[0].tolist(), strict=True)) if token]
    assert path[:4] == [7, 8, 5, 6]
    assert not grow(with_, memory, 1).num_nodes.any(), "one row's text is another's"


def test_a_step_that_grew_no_tree_is_not_judged_by_an_older_one(with_: Ops) -> None:
    memory = trusting(memory_of())
    with_.add_text(memory, 0, TEXT, torch.tensor([5, 6, 7, 8, 5, 6]))
    network = network_of(random.Random(1), 1)
    grow(with_, memory, 0, network)
    grow(with_, memory, 0)
    assert learn(with_, memory, 0, 7, 8) == 1
    assert learn(with_, memory, 0, 7, 8) == 0
    assert not memory.network.num_nodes.any()


def test_a_prediction_continues_the_prompt_and_is_counted(with_: Ops) -> None:
    memory = trusting(memory_of())
    with_.add_text(memory, 0, TEXT, torch.tensor([1, 2]))
    with_.add_text(memory, 0, PREDICTION, torch.tensor([7, 8, 9]))
    assert 7 in below_root(grow(with_, memory, 0))
    learn(with_, memory, 0, 7, 8, 4)
    assert memory.predicted.tolist() == [2, 0, 0]


def test_a_full_bucket_keeps_what_is_frequent_and_takes_what_is_new(with_: Ops) -> None:
    memory = memory_of(buckets=1)
    text = [1, 2] * 30 + [value for n in range(4) for value in (1, 100 + n)]
    with_.add_text(memory, 0, TEXT, torch.tensor(text))
    held = {entry >> 16 & 0xFFFFF for entry in memory.entries[0].tolist() if entry & 0xFFFF}
    assert {1, 2, 103} <= held, "the frequent ones, and the newest"
    assert 100 not in held


def test_weights_learn_what_comes_true(with_: Ops) -> None:
    """Of two successors that were seen as often, one never comes."""
    memory = memory_of()
    with_.add_text(memory, 0, TEXT, torch.tensor([1, 2, 1, 3, 1]))
    before = grow(with_, memory, 0).survival[0, :2].tolist()
    for _ in range(20):
        learn(with_, memory, 0, 2, 1)
    tree = grow(with_, memory, 0)
    survival = {token: float(tree.survival[0, place]) for place, token in _roots_children(tree)}
    assert before == [0.5, 0.5]
    assert survival[2] > 0.8 > 0.2 > survival.get(3, 0.0)
    assert memory.weights[0].any()
    assert not memory.weights[1].any(), "of another scope"


def test_a_networks_nodes_and_texts_make_one_tree(with_: Ops) -> None:
    """What the network proposes goes on where it does, and where texts know better."""
    memory = trusting(memory_of())
    with_.add_text(memory, 0, TEXT, torch.tensor([5, 6, 9, 4]))
    network = DraftTree.of(torch.tensor([[5, 3, 8]]), torch.tensor([[ROOT, ROOT, 0]]))
    network = network._replace(survival=torch.tensor([[0.8, 0.1, 0.4]]))
    tree = grow(with_, memory, 0, network=network)
    paths = _paths(tree)
    assert {(5,), (3,), (5, 8), (5, 6), (5, 6, 9)} <= paths
    assert learn(with_, memory, 0, 5, 8) == 0, "the tree without the network had neither"


def test_what_the_target_chose_after_rejected_nodes_is_proposed(with_: Ops) -> None:
    """Of the tree 5 (9), 7 the target takes 5: what it would have written after 9 is known now, in this text alone."""
    memory = trusting(memory_of())
    for row in range(2):
        with_.add_text(memory, row, TEXT, torch.tensor([1]))
    verified = DraftTree.of(torch.tensor([[5, 7, 9]]), torch.tensor([[ROOT, ROOT, 0]]))
    learn(with_, memory, 0, 5, 6, 9, verified=verified, choices=(5, 6, 8, 4))
    paths = _paths(grow(with_, memory, 0))
    assert (4,) in paths, "after 9"
    assert not any(8 in path for path in paths), "after 7, which no text has"
    assert learn(with_, memory, 1, 9) == 0
    assert below_root(grow(with_, memory, 1)) == set(), "what was not written is no past answer"
    entries = [entry & 0xFFFF for entry in memory.entries.flatten().tolist() if entry >> 16 & 0xFFFFF == 4]
    assert set(entries) == {4}, "a quarter of a sighting"


def test_a_network_claims_at_a_depth_after_other_nodes_too(with_: Ops) -> None:
    memory = trusting(memory_of())
    with_.add_text(memory, 0, TEXT, torch.tensor([4, 7, 4]))
    network = DraftTree.of(torch.tensor([[5, 8]]), torch.tensor([[ROOT, 0]]))
    network = network._replace(survival=torch.tensor([[0.5, 0.4]]))
    paths = _paths(grow(with_, memory, 0, network=network))
    assert {(5, 8), (7, 8)} <= paths
    assert (7, 5) not in paths, "claimed at another depth"


def test_candidates_rank_by_the_noise_of_their_position_where_tokens_are_drawn(with_: Ops) -> None:
    memory, successors = memory_of(), torch.arange(2, 9)
    with_.add_text(memory, 0, TEXT, torch.stack([torch.ones_like(successors), successors], 1).flatten())
    with_.add_text(memory, 0, TEXT, torch.tensor([1]))
    assert grow(with_, memory, 0).survival[0, : len(successors)].unique().numel() == 1
    memory.weights[:, :, -12:] = torch.arange(12) / 4
    memory.warm.fill_(True)
    memory.seeds.fill_(11)
    for root in range(6):
        memory.roots.fill_(root)
        tree = grow(with_, memory, 0)
        survival = {token: float(tree.survival[0, place]) for place, token in _roots_children(tree)}
        noise = gumbel_noise_of(torch.tensor([11]), torch.tensor([root + 1]), successors)[0].tolist()
        pairs = sorted(
            (drawn, survival.get(token, 0.0)) for drawn, token in zip(noise, successors.tolist(), strict=True)
        )
        chances = [chance for _, chance in pairs]
        assert chances == sorted(chances)
        assert chances[0] < chances[-1]


def network_of(rng: random.Random, batch: int) -> DraftTree:
    """Trees of three to nine nodes, each below an earlier one or the root."""
    nodes = rng.randrange(3, 10)
    parents = torch.tensor([[rng.randrange(ROOT, n) for n in range(nodes)] for _ in range(batch)])
    tree = DraftTree.of(torch.zeros(batch, nodes, dtype=torch.int64), parents)
    survival = torch.ones(batch, nodes)
    tokens = torch.empty(batch, nodes, dtype=torch.int64)
    for line in range(batch):
        for node, parent in enumerate(parents[line].tolist()):
            above = 1.0 if parent == ROOT else float(survival[line, parent])
            survival[line, node] = above * rng.choice((0.9, 0.5, 0.2, 0.03))
            siblings = {int(tokens[line, other]) for other in range(node) if int(parents[line, other]) == parent}
            tokens[line, node] = rng.choice([token for token in range(12) if token not in siblings])
    return tree._replace(tokens=tokens, survival=survival)


def _paths(tree: DraftTree) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
        paths.append(((*paths[parent],) if parent >= 0 else ()) + (token,))
    return set(paths[: int(tree.num_nodes[0])])


# Counts of what followed contexts, joint trees and what is learnt of them by all kernels, against the references.

Everywhere = tuple[Ops, str]
PADDING, FEW_NODES, FEW_BUCKETS = 4, 5, 4  # the row that fills up batches, which has no parts


def crowded_memory(buckets: int = FEW_BUCKETS, proposed: int = FEW_NODES) -> Memory:
    """Rows that share two scopes, with room for as many nodes of a network's tree."""
    memory = trusting(Memory.empty(PADDING + 1, (2 * PADDING + 2 + SCOPES) * buckets, SCOPES, proposed))
    for row in range(PADDING):
        lines = 2 * row, 2 * row + 1, 2 * PADDING + 2 + row % SCOPES
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
    expected = crowded_memory(buckets)
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
    rng, expected = random.Random(batch), crowded_memory()
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
        network = network_of(rng, len(rows)).first(len(rows), FEW_NODES)
        network.num_nodes[:] = torch.tensor([network.width] * batch + [0])
        verified = network_of(rng, len(rows)).first(len(rows), 4)
        verified.num_nodes[:] = torch.tensor([*(verified.width - line % 2 for line in range(batch)), 0])
        choices = torch.tensor([[rng.randrange(6) for _ in range(verified.width + 1)] for _ in rows])
        choices[:, 0] = verified.tokens[:, 0]  # is accepted: nothing is counted after it
        for memory in (expected, found):
            drawn = random.Random(batch + with_network)
            for values in (memory.warm, memory.stores):
                values.copy_(torch.tensor([drawn.random() < 0.6 for _ in range(PADDING + 1)]))
            for values in (memory.seeds, memory.roots):
                values.copy_(torch.tensor([drawn.randrange(1 << 62) for _ in range(PADDING + 1)]))
        given = rows.to(device), tokens.to(device), counts.to(device)
        tree = REFERENCE.grow_joint_tree(expected, rows, network if with_network else None, FEW_NODES, LEAST)
        proposed = network.to(torch.device(device)) if with_network else None
        assert_same_trees(kernels.grow_joint_tree(found, given[0], proposed, FEW_NODES, LEAST), tree)
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
    expected = crowded_memory(proposed=network.width)
    REFERENCE.add_text(expected, 2, TEXT, torch.tensor([3, 36, 3, 41, 3]))
    found, row = copy_of(expected, device), torch.tensor([2])
    tree = REFERENCE.grow_joint_tree(expected, row, network, FEW_NODES, LEAST)
    same = kernels.grow_joint_tree(found, row.to(device), network.to(torch.device(device)), FEW_NODES, LEAST)
    assert_same_trees(same, tree)
    assert_same_trees(found.network, expected.network)
    spoken, nodes = (torch.tensor([[36]]), torch.tensor([1])), DraftTree.empty(1)
    REFERENCE.learn_committed(expected, row, *spoken, nodes, spoken[0], RATE)
    tokens, counts = (value.to(device) for value in spoken)
    kernels.learn_committed(found, row.to(device), tokens, counts, nodes.to(torch.device(device)), tokens, RATE)
    assert_remembers(found, expected)


def test_a_token_that_several_nodes_claim_at_a_depth_is_one_candidate(everywhere: Everywhere) -> None:
    """After 7, which the network does not propose, and with chances that are all the same."""
    kernels, device = everywhere
    network = DraftTree.of(torch.tensor([[1, 2, 5, 5]]), torch.tensor([[ROOT, ROOT, 0, 1]]))
    network = network._replace(survival=torch.tensor([[0.6, 0.4, 0.5, 0.2]]))
    expected, row = crowded_memory(proposed=8), torch.tensor([0])
    expected.weights.zero_()
    REFERENCE.add_text(expected, 0, TEXT, torch.tensor([3, 7, 3]))
    found = copy_of(expected, device)
    tree = REFERENCE.grow_joint_tree(expected, row, network, 8, 0.2)
    same = kernels.grow_joint_tree(found, row.to(device), network.to(torch.device(device)), 8, 0.2)
    assert_same_trees(same, tree)
    assert sorted(tree.tokens[0].tolist()) == [0, 1, 2, 3, 5, 5, 5, 7]
