"""Counted labels, compiled as by the reference."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import ops
from kernels.ops import REFERENCE
from kernels.survival import CLAIMS, DEPTHS, HitCounts, Proposed
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


@given(draft_trees(), st.integers(0, 2**30))
def test_claims_are_counted_alike(tree: DraftTree, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tables = [counts(DEPTHS * CLAIMS, torch.Generator().manual_seed(seed)) for _ in range(2)]
    bins = [torch.ones(3, 10) for _ in range(2)]
    buckets = torch.randint(DEPTHS * CLAIMS, tree.tokens.shape, generator=generator)
    claimed = torch.rand(tree.tokens.shape, generator=generator)
    num_known = torch.randint(1, 5, (tree.batch,), generator=generator)
    committed = torch.randint(3, (tree.batch, 4), generator=generator)
    if tree.width:
        committed[:, 0] = tree.tokens[:, 0]  # the first node is right
    for _ in range(3):
        for kind, table, held in zip((REFERENCE, COMPILED), tables, bins, strict=True):
            kind.count_claims(table, held, 0.9, tree, claimed, buckets, committed, num_known)
    for part in ("came_true", "expected", "rates"):
        assert torch.allclose(getattr(tables[0], part), getattr(tables[1], part))
    assert torch.allclose(bins[0], bins[1])
    assert (bins[1][2].sum() > 10.1 * 0.9**3) == bool(tree.num_nodes.any())
