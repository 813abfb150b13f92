"""Hit rates and pruned trees, compiled as by the reference."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import ops
from kernels.ops import REFERENCE
from kernels.survival import CLAIMS, DEPTHS, HitCounts, Proposed, Pruned, survival_order
from kernels.trees import DraftTree, select_nodes
from tests.drafters.trees import draft_trees, path_to
from tests.kernels.test_trees import likeliest

COMPILED = ops.on(torch.device("cpu"))


def counts(buckets: int) -> HitCounts:
    return HitCounts.empty(buckets, prior=1.5, decay=0.9, limits=(0.2, 0.9), device="cpu")


@given(st.lists(draft_trees(), min_size=1, max_size=3), st.integers(0, 2**30))
def test_what_was_proposed_is_judged_alike(trees: list[DraftTree], seed: int) -> None:
    rows, width = max(tree.batch for tree in trees) + 1, max(tree.width for tree in trees) + 2
    drawn, logs, tables = torch.Generator().manual_seed(seed), list[Proposed](), list[HitCounts]()
    for _ in range(2):
        ids = torch.zeros(4, rows, width, dtype=torch.int64)
        logs.append(Proposed(ids[0], ids[1], ids[2], torch.zeros(rows, width), ids[3]))
        tables.append(counts(7))
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
    tables = [counts(DEPTHS * CLAIMS) for _ in range(2)]
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


WIDTHS = torch.tensor([0, 2, 4, 8])


def assert_pruned_alike(
    tree: DraftTree, deepest: Tensor, requested: Tensor, rates: Tensor, seconds: Tensor, weights: Tensor, width: int
) -> list[Pruned]:
    """By both, in rows for as many nodes as each tree has, and laid out before. # -> by the compiled op"""
    found = []
    for widths in (None, WIDTHS):
        prices = seconds[: tree.tokens.numel() + 1 if widths is None else len(WIDTHS)]
        given = tree, deepest, requested, rates, prices, weights, width, widths
        expected, pruned = REFERENCE.prune_trees(*given), COMPILED.prune_trees(*given)
        assert all(map(torch.equal, pruned.trees, expected.trees))
        assert torch.equal(pruned.sizes, expected.sizes)
        valid = pruned.trees.valid
        assert torch.equal(pruned.claimed[valid], expected.claimed[valid])
        assert torch.equal(pruned.buckets[valid], expected.buckets[valid])
        found.append(pruned)
    return found


@given(draft_trees(max_batch=16), st.integers(0, 14), st.integers(0, 2**30))
def test_the_same_nodes_are_kept(tree: DraftTree, width: int, seed: int) -> None:
    """All is in halves and quarters, whose sums and products are exact in any order, so that ties are ties in both."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*values: float, count: int = tree.batch) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (count,), generator=generator)]

    deepest, requested = (torch.randint(low, 14, (tree.batch,), generator=generator) for low in (0, -1))
    rates = draw(0.5, 0.25, count=DEPTHS * CLAIMS)
    seconds = 1.0 + draw(0.0, 0.0, 0.125, 0.5, count=max(len(WIDTHS), tree.tokens.numel() + 1)).cumsum(0)
    seconds[1 + seed % 20 :] = torch.inf  # more than there is room for
    weights = draw(1.0, 1.5, 4.0)
    exact, fixed = assert_pruned_alike(tree, deepest, requested, rates, seconds, weights, width)
    assert (exact.sizes[:, 0] <= requested.clamp(min=0)).all()
    assert (fixed.sizes[:, 1] == torch.minimum(requested, fixed.sizes[:, 2]).clamp(0, min(width, tree.width))).all()
    for all_wished in assert_pruned_alike(tree, deepest, requested, rates, seconds[:0], weights, width):
        assert torch.equal(all_wished.sizes[:, 0], torch.minimum(requested, all_wished.sizes[:, 2]).clamp(min=0))


@given(draft_trees(), st.integers(0, 6), st.integers(0, 2**30))
def test_survival_is_corrected_alike(tree: DraftTree, deepest: int, seed: int) -> None:
    """To rounding, by which equals may come in another order."""
    rates = 2 * torch.rand(DEPTHS * CLAIMS, generator=torch.Generator().manual_seed(seed))
    ends, ones = torch.full_like(tree.num_nodes, deepest), torch.ones(tree.batch)
    given = tree, ends, tree.num_nodes, rates, torch.empty(0), ones, tree.width
    expected, found = REFERENCE.prune_trees(*given), COMPILED.prune_trees(*given)
    assert torch.equal(found.sizes, expected.sizes)
    valid = expected.trees.valid
    for ours, theirs in ((found.trees.survival, expected.trees.survival), (found.claimed, expected.claimed)):
        assert torch.allclose((ours * valid).sort(1).values, (theirs * valid).sort(1).values)


@given(draft_trees(), st.data())
def test_survival_order_sorts_the_whole_batch(tree: DraftTree, data: st.DataObject) -> None:
    limits = [data.draw(st.integers(0, tree.tokens.shape[1] + 2)) for _ in tree.num_nodes]
    survival, owners = survival_order(tree, torch.tensor(limits), torch.ones(tree.batch))
    oracle = [(-float(tree.survival[b, i]), b) for b in range(len(limits)) for i in likeliest(tree, b, limits[b])]
    total = len(oracle)
    assert [(-s, b) for s, b in zip(survival.tolist(), owners.tolist(), strict=True)][:total] == sorted(oracle)
    assert (owners[total:] == -1).all()
    assert not survival[total:].any()


@given(draft_trees(), st.integers(0, 20))
def test_any_prefix_of_the_common_order_is_a_set_of_trees(tree: DraftTree, total: int) -> None:
    _, owners = survival_order(tree, tree.num_nodes, torch.ones(tree.batch))
    owners = owners[:total]
    keep = torch.bincount(owners[owners >= 0], minlength=len(tree.num_nodes))
    kept, _ = select_nodes(tree, keep, tree.width)
    assert (kept.num_nodes == keep).all()
    assert (kept.parents < torch.arange(kept.tokens.shape[1])).all()
