"""Counted labels and corrected survival, compiled as by the reference."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import ops
from kernels.hit_rates import CLAIMS, DEPTHS, HitCounts, Proposed
from kernels.ops import REFERENCE
from kernels.trees import DraftTree
from tests.drafters.trees import draft_trees, path_to

torch.set_num_threads(1)

COMPILED = ops.on(torch.device("cpu"))


def counts(buckets: int, generator: torch.Generator) -> HitCounts:
    prior, expected = (1 + torch.rand(buckets, generator=generator) for _ in range(2))
    zeros = (torch.zeros(buckets) for _ in range(3))
    came_true, so_far, rates = zeros
    return HitCounts(prior, expected, came_true, so_far, rates, 0.9, 0.2, 0.9)


@given(st.integers(0, 2**30), st.integers(1, 40))
def test_labels_are_counted_alike(seed: int, labels: int) -> None:
    tables = [counts(7, torch.Generator().manual_seed(seed)) for _ in range(2)]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(5):
        buckets = torch.randint(7, (2, labels), generator=generator)
        true, expected = torch.rand(2, 2, labels, generator=generator)
        for kind, table in zip((REFERENCE, COMPILED), tables, strict=True):
            kind.count_hits(table, buckets, true > 0.5, expected)
    for part in ("came_true", "expected", "rates"):
        assert torch.allclose(getattr(tables[0], part), getattr(tables[1], part))
    assert tables[1].rates.min() >= 0.2
    assert tables[1].rates.max() <= 0.9


@given(st.lists(draft_trees(), min_size=1, max_size=3), st.integers(0, 2**30))
def test_what_was_proposed_is_judged_alike(trees: list[DraftTree], seed: int) -> None:
    rows, width = max(tree.batch for tree in trees) + 1, max(tree.width for tree in trees) + 2
    drawn, logs, tables = torch.Generator().manual_seed(seed), list[Proposed](), list[HitCounts]()
    for _ in range(2):
        ids = torch.zeros(4, rows, width, dtype=torch.int64)
        logs.append(Proposed(ids[0], ids[1], ids[2], torch.zeros(rows, width), ids[3]))
        tables.append(counts(7, torch.Generator().manual_seed(seed)))
    for tree in trees:
        at = torch.randperm(rows, generator=drawn)[: tree.batch]
        chosen = torch.randint(40, tree.tokens.shape, generator=drawn)
        predicted = torch.rand(tree.batch, 40, generator=drawn)
        buckets = torch.randint(7, (40,), generator=drawn)
        # Texts that follow a random node of each tree, and one token of another.
        longest = 6
        text = torch.randint(3, (tree.batch, longest), generator=drawn)
        lengths = torch.randint(1, longest + 1, (tree.batch,), generator=drawn)
        for line in range(tree.batch):
            if (found := int(tree.num_nodes[line])) > 0:
                path = path_to(tree, line, int(torch.randint(found, (1,), generator=drawn)))[:longest]
                text[line, : len(path)] = tree.tokens[line, path]
        came = []
        for kind, log, table in zip((REFERENCE, COMPILED), logs, tables, strict=True):
            kind.keep_proposed(log, at, tree, chosen, predicted, buckets)
            came.append(kind.judge_proposed(log, table, at, text, lengths, 4))
        assert torch.equal(*came)
        assert all(map(torch.equal, *logs))
        assert not logs[1].depths[at].any()
    for part in ("came_true", "expected", "rates"):
        assert torch.allclose(getattr(tables[0], part), getattr(tables[1], part))


@given(draft_trees(), st.integers(0, 6), st.integers(0, 2**30))
def test_survival_is_corrected_alike(tree: DraftTree, deepest: int, seed: int) -> None:
    rates = 2 * torch.rand(DEPTHS * CLAIMS, generator=torch.Generator().manual_seed(seed))
    ends = torch.full_like(tree.num_nodes, deepest)
    expected, found = (kind.correct_survival(tree, ends, rates) for kind in (REFERENCE, COMPILED))
    assert torch.allclose(found.survival, expected.survival)
    assert torch.allclose(found.conditional, expected.conditional)
    assert torch.equal(found.buckets[tree.valid], expected.buckets[tree.valid])
