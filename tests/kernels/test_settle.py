"""What a verified step makes permanent, by the reference, compiled and on the device, against lists."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import settle as reference
from kernels.ops import REFERENCE, Ops
from kernels.settle import Verified
from kernels.tree_attention import MAX_DEPTH, NULL_SLOT
from kernels.triton import settle as on_device
from tests.kernels.random_walks import Tree

LENGTH = 400
SIZES = pytest.mark.parametrize(
    ("batch", "width"), [(1, 0), (1, 1), (1, 24), (2, 256), (3, 7), (5, 64), (16, 31), (16, 0), (0, 0)]
)


@dataclass
class Step:
    """One verified step: some of its lines choose tokens, and have rows of nodes, more than trees have in part."""

    trees: list[Tree]
    num_nodes: list[int]
    args: tuple[Any, ...]

    @staticmethod
    def draw(batch: int, width: int) -> "Step":
        rng = random.Random(batch + 100 * width)
        lines = batch + rng.randrange(3)
        completing = sorted(rng.sample(range(lines), batch))
        trees = [Tree.draw(rng, rng.randint(0, width)) for _ in range(batch)]
        num_nodes = [rng.randint(len(tree.tokens), width) for tree in trees]
        if batch:
            trees[0], num_nodes[0] = Tree.draw(rng, width), width
        tokens, parents, counts = ints(lines, width), ints(lines, width) - 1, ints(lines)
        for line, tree in zip(completing, trees, strict=True):
            own = counts[line] = len(tree.tokens)
            tokens[line, :own], parents[line, :own] = torch.tensor([tree.tokens, tree.parents])
            tokens[line, own:] = tree.targets[0]  # padding looks like children of the root that carry its token
        logits = [(b, 0, tree.targets[0]) for b, tree in enumerate(trees)]
        for b, tree in enumerate(trees):
            chosen = [*tree.targets[1:], *[0] * width]
            logits += [(b, node + 1, chosen[node]) for node in range(num_nodes[b])]
        logits += [(batch - 1, width + 1, 7)] * (3 * bool(batch))  # of a captured shape
        sequence, place, token = torch.tensor(logits, dtype=torch.int64).view(-1, 3).unbind(1)
        rows = len(logits) + 5
        numbers = torch.tensor(rng.sample(range(1, 20_000), rows + lines * width))
        args = (
            torch.randint(20_000, 30_000, (lines + 3, LENGTH), generator=torch.Generator().manual_seed(batch)),
            (token.clone(), torch.tensor([int(rng.random() < 0.1) for _ in logits], dtype=torch.int64)),
            (torch.tensor(rng.sample(range(rows), len(logits)), dtype=torch.int64), sequence.clone(), place.clone()),
            (torch.tensor(completing, dtype=torch.int64), torch.tensor(num_nodes, dtype=torch.int64)),
            (
                torch.tensor(rng.sample(range(lines + 3), lines), dtype=torch.int64),
                torch.tensor([rng.randrange(LENGTH - MAX_DEPTH - 1) for _ in range(lines)], dtype=torch.int64),
                numbers[rows:].view(lines, width),
            ),
            numbers[:rows],
            (tokens, parents, counts),
            torch.randint(100, (rng.randint(0, batch), 3), generator=torch.Generator().manual_seed(batch)),
        )
        return Step(trees, num_nodes, args)


def ints(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64)


def to(device: str, values: Any) -> Any:
    """A copy of nested tensors."""
    return tuple(to(device, value) if isinstance(value, tuple) else value.clone().to(device) for value in values)


def check(settle: Callable[..., Verified], step: Step, device: str = "cpu") -> None:
    table, *rest = to(device, step.args)
    found = Verified(*(value.cpu() for value in settle(table, *rest)))
    expected, choice, logits, completing, lines, slots, _, sizes = step.args
    expected, freed = expected.clone(), list[int]()
    width = found.target_tokens.shape[1] - 1
    assert found.path.shape == (len(step.trees), min(width, MAX_DEPTH))
    assert torch.equal(found.emitted[:, 4:], found.tokens)
    assert torch.equal(found.emitted[:, 1:4], pad(sizes, (0, 0, 0, len(step.trees) - len(sizes))))
    line_of = {key: line for line, key in enumerate(zip(*(x.tolist() for x in logits[1:]), strict=True))}
    for b, (tree, nodes) in enumerate(zip(step.trees, step.num_nodes, strict=True)):
        walk, line = tree.walk(), int(completing[0][b])
        count, targets = len(walk), tree.targets
        row, root, node_slots = int(lines[0][line]), int(lines[1][line]), lines[2][line].tolist()
        chosen_by = [line_of[b, node + 1] for node in (-1, *walk)]
        rows = logits[0][chosen_by].tolist()
        assert found.path[b].tolist() == walk + [-1] * (found.path.shape[1] - count)
        assert (int(found.num_accepted[b]), int(found.counts[b])) == (count, count + 1)
        assert int(found.bonus[b]) == targets[walk[-1] + 1 if walk else 0]
        assert found.target_tokens[b, : len(targets)].tolist() == targets
        text = [*(tree.tokens[node] for node in walk), int(found.bonus[b])]
        assert found.tokens[b].tolist() == text + [-1] * (found.path.shape[1] - count)
        assert bool(found.emitted[b, 0]) == bool(choice[1][chosen_by].any())
        assert found.path_logits[b, : count + 1].tolist() == chosen_by
        assert found.path_rows[b].tolist() == rows + rows[:1] * (found.path.shape[1] - count)
        assert torch.equal(found.slots[b], slots[found.path_rows[b]])
        assert (int(found.table_rows[b]), int(found.roots[b])) == (row, root)
        expected[row, root + 1 : root + 1 + count] = torch.tensor([node_slots[node] for node in walk])
        freed += [node_slots[node] for node in range(nodes) if node not in walk]
    assert found.freed.tolist() == freed + [NULL_SLOT] * (len(step.trees) * width - len(freed))
    assert torch.equal(table.cpu(), expected)


@SIZES
def test_a_path_is_kept_and_all_else_freed(batch: int, width: int, anywhere: tuple[Ops, str]) -> None:
    check(anywhere[0].settle, Step.draw(batch, width), anywhere[1])


@SIZES
def test_compiled_equals_the_reference(batch: int, width: int, compiled: Ops) -> None:
    """To the last number that means nothing; trees are parts of wider ones."""
    step = Step.draw(batch, width)
    (one, *rest), (other, *more) = to("cpu", step.args), to("cpu", step.args)
    rest[-2] = (*(torch.cat([x, x], dim=1)[:, :width] for x in rest[-2][:2]), rest[-2][2])
    found, expected = compiled.settle(one, *rest), REFERENCE.settle(other, *more)
    assert torch.equal(one, other)
    for name, value in found._asdict().items():
        assert torch.equal(value, getattr(expected, name)), name


def test_a_chain_is_kept_to_the_depth_limit(everywhere: tuple[Ops, str]) -> None:
    nodes = MAX_DEPTH + 3
    step = Step.draw(1, nodes)
    line, chain = step.args[3][0], torch.arange(nodes)
    step.args[6][0][line], step.args[6][1][line] = chain, chain - 1
    step.args[1][0][: nodes + 1] = torch.arange(nodes + 1)
    step.trees[0] = Tree(chain.tolist(), (chain - 1).tolist(), list(range(nodes + 1)))
    check(everywhere[0].settle, step, everywhere[1])


@pytest.mark.parametrize("implementation", [reference, on_device], ids=["reference", "triton"])
def test_the_walk_of_the_first_of_equal_siblings_and_of_no_nodes(implementation: ModuleType, device: str) -> None:
    tokens, parents = torch.tensor([[4, 4, 5, 5]], device=device), torch.tensor([[-1, -1, 0, 1]], device=device)
    targets, counts = torch.tensor([[4, 5, 5, 8, 9]], device=device), torch.tensor([4], device=device)
    accepted = implementation.accept(tokens, parents, counts, targets)
    assert accepted.path.tolist() == [[0, 2, -1, -1]]
    assert accepted.bonus.tolist() == [8]
    none, zero, table = tokens[:, :0], counts - 4, torch.arange(10, device=device)[None]
    accepted = implementation.accept(none, none, zero, targets[:, :1])
    assert (accepted.path.shape, accepted.num_accepted.tolist(), accepted.bonus.tolist()) == ((1, 0), [0], [4])
    assert implementation.commit_slots(none, zero, zero, none, zero, zero + 3, table).shape == (0,)
    assert table[0].tolist() == list(range(10))
