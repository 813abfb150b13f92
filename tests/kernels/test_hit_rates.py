"""Counted labels and corrected survival, compiled as by the reference."""

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


@given(draft_trees(), st.integers(0, 6), st.integers(0, 2**30))
def test_survival_is_corrected_alike(tree: DraftTree, deepest: int, seed: int) -> None:
    rates = 2 * torch.rand(DEPTHS * CLAIMS, generator=torch.Generator().manual_seed(seed))
    ends = torch.full_like(tree.num_nodes, deepest)
    expected, found = (kind.correct_survival(tree, ends, rates) for kind in (REFERENCE, COMPILED))
    assert torch.allclose(found.survival, expected.survival)
    assert torch.allclose(found.conditional, expected.conditional)
    assert torch.equal(found.buckets[tree.valid], expected.buckets[tree.valid])
