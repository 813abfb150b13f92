"""Flattening extends and trees into rows, against a plain walk over them."""

import random
from collections.abc import Sequence

import pytest
import torch

from drafters.tree import DraftTree
from kernels.tree_attention import NULL_SLOT
from service.engine.rows import ExtendRows, ForwardRows, flatten
from tests.kernels.attention_parts import random_parents

torch.set_num_threads(1)

Row = tuple[int, int, int, int]  # sequence, position, node, token


def random_step(rng: random.Random) -> tuple[list[ExtendRows], DraftTree]:
    """Chains of several kinds; only a single completing row has a tree below it."""
    extends, counts, start = [], [], 0
    for line in rng.sample(range(9), rng.randrange(1, 6)):
        length = rng.choice([1, 1, 2, 17])
        extends.append(ExtendRows(line, start, rng.choices(range(100), k=length), completes=rng.random() < 0.7))
        counts.append(rng.choice([0, 1, 9]) if length == 1 and extends[-1].completes else 0)
        start += rng.randrange(200)
    return extends, tree_of([random_parents(rng, count) for count in counts], rng)


def tree_of(parents: Sequence[list[int]], rng: random.Random) -> DraftTree:
    width = max(map(len, parents))
    tree = DraftTree(
        torch.zeros(len(parents), width, dtype=torch.int64),
        torch.full((len(parents), width), -1),
        torch.zeros(len(parents), width, dtype=torch.int64),
        torch.zeros(len(parents), width),
        torch.tensor([len(line) for line in parents]),
    )
    for line, above in enumerate(parents):
        for node, parent in enumerate(above):
            tree.tokens[line, node], tree.parents[line, node] = rng.randrange(100), parent
            tree.depths[line, node] = 1 + (int(tree.depths[line, parent]) if parent >= 0 else 0)
    return tree


def expected_rows(extends: list[ExtendRows], tree: DraftTree) -> set[Row]:
    rows = set()
    for line, extend in enumerate(extends):
        rows |= {(line, extend.start + at, -1, token) for at, token in enumerate(extend.tokens)}
        end = extend.start + len(extend.tokens) - 1
        for node in range(int(tree.num_nodes[line])):
            rows.add((line, end + int(tree.depths[line, node]), node, int(tree.tokens[line, node])))
    return rows


def found_rows(rows: ForwardRows) -> list[Row]:
    columns = (rows.attention.sequence, rows.attention.positions, rows.attention.node, rows.tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_one_row(seed: int) -> None:
    extends, tree = random_step(random.Random(seed))
    expected = expected_rows(extends, tree)
    slots = 1 + torch.randperm(len(expected))
    rows = flatten(extends, tree, slots, tree.num_nodes.tolist())
    assert len(found_rows(rows)) == rows.num_rows == len(expected)
    assert set(found_rows(rows)) == expected
    assert torch.equal(rows.slots, slots)


@pytest.mark.parametrize("seed", range(20))
def test_who_chooses_a_next_token(seed: int) -> None:
    """The last row of each completing extend and the nodes below it, each knowing whose it is."""
    extends, tree = random_step(random.Random(seed))
    rows = flatten(extends, tree, 1 + torch.arange(len(expected_rows(extends, tree))), tree.num_nodes.tolist())
    completing = [line for line, extend in enumerate(extends) if extend.completes]
    ends = [extend.start + len(extend.tokens) - 1 for extend in extends]
    all_rows = found_rows(rows)
    choosing = [all_rows[at] for at in rows.logit_rows.tolist()]
    assert rows.completing.tolist() == completing
    assert sorted(choosing) == sorted(r for r in all_rows if r[0] in completing and (r[2] >= 0 or r[1] == ends[r[0]]))
    assert [completing[at] for at in rows.logit_sequence.tolist()] == [row[0] for row in choosing]


@pytest.mark.parametrize("seed", range(10))
def test_what_attention_is_told(seed: int) -> None:
    extends, tree = random_step(random.Random(seed))
    rows = flatten(extends, tree, 1 + torch.randperm(len(expected_rows(extends, tree))), tree.num_nodes.tolist())
    told = rows.attention
    assert told.table_rows.tolist() == [extend.table_row for extend in extends]
    assert told.extend_end.tolist() == [extend.start + len(extend.tokens) - 1 for extend in extends]
    slot_of = dict(
        zip(((r[0], r[2]) for r in found_rows(rows) if r[2] >= 0), rows.slots[told.node >= 0].tolist(), strict=True)
    )
    for line in range(len(extends)):
        for node in range(tree.width):
            assert int(told.node_slots[line, node]) == slot_of.get((line, node), NULL_SLOT)
            above = set(path_to(tree, line, node)) if node < int(tree.num_nodes[line]) else None
            found = set(told.ancestors[line, node].nonzero()[:, 0].tolist())
            assert above is None or found == above


def path_to(tree: DraftTree, line: int, node: int) -> list[int]:
    return [] if node < 0 else [*path_to(tree, line, int(tree.parents[line, node])), node]
