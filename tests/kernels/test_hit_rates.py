"""Counted labels, compiled as by the reference."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import ops
from kernels.hit_rates import CLAIMS, DEPTHS, HitCounts
from kernels.ops import REFERENCE
from kernels.trees import DraftTree
from tests.drafters.trees import draft_trees

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
