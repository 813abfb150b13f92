"""Flattening extends and trees into rows, by the reference and compiled, against a plain walk over them."""

import random
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from kernels.graph_runner import GraphRunner
from kernels.ops import REFERENCE, Ops
from kernels.rows import ExtendRows, ForwardRows
from kernels.tree_attention import NULL_SLOT, AttentionRows
from kernels.trees import DraftTree
from service.engine.rows import place_rows
from tests.kernels.attention_parts import random_parents

Row = tuple[int, int, int, int]  # sequence, position, node, token


def random_step(rng: random.Random, most: int = 5) -> tuple[list[ExtendRows], DraftTree]:
    """Chains of several kinds; only a single completing row has a tree below it."""
    extends, counts, start = [], [], 0
    for line in rng.sample(range(most + 4), rng.randint(1, most)):
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


def laid_out(
    kind: Ops, extends: list[ExtendRows], tree: DraftTree, nodes: list[int] | None = None
) -> tuple[ForwardRows, Tensor]:
    """Rows in random slots, by default without padding, and the slot table."""
    nodes = tree.num_nodes.tolist() if nodes is None else nodes
    count = sum(len(extend.tokens) for extend in extends) + sum(nodes)
    slots, table = 1 + torch.randperm(count, generator=torch.Generator().manual_seed(count)), torch.full((20, 4000), -1)
    return kind.lay_out_rows(extends, nodes, tree, slots, table, GraphRunner(place_rows)), table


def test_every_token_is_one_row(on_cpu: Ops) -> None:
    for seed in range(20):
        extends, tree = random_step(random.Random(seed))
        expected = expected_rows(extends, tree)
        rows, table = laid_out(on_cpu, extends, tree)
        assert len(found_rows(rows)) == rows.num_rows == len(expected)
        assert set(found_rows(rows)) == expected
        assert len(set(rows.slots.tolist())) == len(expected)
        assert rows.num_extend_rows == sum(len(extend.tokens) for extend in extends)
        chains = zip(rows.slots.tolist(), found_rows(rows)[: rows.num_extend_rows], strict=False)
        written = {(extends[line].table_row, position): slot for slot, (line, position, _, _) in chains}
        assert {(row, at): int(table[row, at]) for row, at in (table >= 0).nonzero().tolist()} == written


def test_compiled_rows_are_the_reference_s(compiled: Ops) -> None:
    """Also those of padding, where trees have nodes for all rows or for some."""
    for seed in range(40):
        rng = random.Random(seed)
        extends, tree = random_step(rng, 16 if seed % 2 else 1)
        nodes = [rng.randint(own, tree.width) if own else 0 for own in tree.num_nodes.tolist()]
        (found, written), (expected, table) = (laid_out(kind, extends, tree, nodes) for kind in (compiled, REFERENCE))
        assert torch.equal(written, table)
        for record in (found, found.attention):
            other = expected if record is found else expected.attention
            for field in fields(other):
                value, right = getattr(record, field.name), getattr(other, field.name)
                if not isinstance(value, AttentionRows):
                    assert torch.equal(value, right) if isinstance(value, Tensor) else value == right, field.name


def test_who_chooses_a_next_token(on_cpu: Ops) -> None:
    """The last row of each completing extend and the nodes below it, each knowing whose it is."""
    for seed in range(20):
        extends, tree = random_step(random.Random(seed))
        rows, _ = laid_out(on_cpu, extends, tree)
        completing = [line for line, extend in enumerate(extends) if extend.completes]
        ends = [extend.start + len(extend.tokens) - 1 for extend in extends]
        all_rows = found_rows(rows)
        choosing = [all_rows[at] for at in rows.logit_rows.tolist()]
        assert rows.completing.tolist() == completing
        assert sorted(choosing) == sorted(
            r for r in all_rows if r[0] in completing and (r[2] >= 0 or r[1] == ends[r[0]])
        )
        assert [completing[at] for at in rows.logit_sequence.tolist()] == [row[0] for row in choosing]


def test_what_attention_is_given(on_cpu: Ops) -> None:
    for seed in range(10):
        extends, tree = random_step(random.Random(seed))
        rows, _ = laid_out(on_cpu, extends, tree)
        reported = rows.attention
        assert reported.table_rows.tolist() == [extend.table_row for extend in extends]
        assert reported.extend_end.tolist() == [extend.start + len(extend.tokens) - 1 for extend in extends]
        slot_of = dict(
            zip(
                ((r[0], r[2]) for r in found_rows(rows) if r[2] >= 0),
                rows.slots[reported.node >= 0].tolist(),
                strict=True,
            )
        )
        for line in range(len(extends)):
            for node in range(tree.width):
                assert int(reported.node_slots[line, node]) == slot_of.get((line, node), NULL_SLOT)
                above = set(path_to(tree, line, node)) if node < int(tree.num_nodes[line]) else None
                found = set(reported.ancestors[line, node].nonzero()[:, 0].tolist())
                assert above is None or found == above


def path_to(tree: DraftTree, line: int, node: int) -> list[int]:
    return [] if node < 0 else [*path_to(tree, line, int(tree.parents[line, node])), node]
