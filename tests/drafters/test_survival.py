import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.survival import AcceptanceTable, tried_and_accepted
from drafters.tree import ROOT, DraftTree
from tests.drafters.trees import draft_trees


@given(draft_trees(), st.data())
def test_a_node_is_tried_when_its_parent_was_accepted(tree: DraftTree, data: st.DataObject) -> None:
    batch, nodes = tree.tokens.shape
    paths = [_draw_path(tree, b, data) for b in range(batch)]
    depth = max(map(len, paths))
    path = torch.tensor([p + [-1] * (depth - len(p)) for p in paths], dtype=torch.int64).reshape(batch, depth)
    tried, accepted = tried_and_accepted(tree, path)
    for b in range(batch):
        for i in range(nodes):
            exists = i < tree.num_nodes[b]
            assert accepted[b, i] == (exists and i in paths[b])
            assert tried[b, i] == (exists and int(tree.parents[b, i]) in [ROOT, *paths[b]])


def _draw_path(tree: DraftTree, b: int, data: st.DataObject) -> list[int]:
    path: list[int] = []
    parent = ROOT
    while children := [i for i in range(int(tree.num_nodes[b])) if tree.parents[b, i] == parent]:
        parent = data.draw(st.sampled_from([ROOT, *children]))
        if parent == ROOT:
            break
        path.append(parent)
    return path


def table(decay: float) -> AcceptanceTable:
    return AcceptanceTable(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 4.0, 4.0]), decay=decay)


def test_the_prior_speaks_first() -> None:
    assert table(0.9).rate(torch.tensor([[0, 2], [1, 1]])).tolist() == [[0.25, 0.75], [0.5, 0.5]]


def test_rates_are_counts_and_the_mask_hides() -> None:
    rates = table(1.0)
    rates.observe(torch.tensor([0, 0, 0, 1]), torch.tensor([True, True, False, True]), torch.tensor([1, 1, 1, 0]) > 0)
    assert torch.equal(rates.rate(torch.arange(3)), torch.tensor([3.0, 2.0, 3.0]) / torch.tensor([7.0, 4.0, 4.0]))


def test_rates_converge_to_each_buckets_own_acceptance() -> None:
    rates, generator = table(0.999), torch.Generator().manual_seed(1)
    truth = torch.tensor([0.1, 0.9, 0.5])
    for _ in range(2000):
        buckets = torch.randint(3, (8,), generator=generator)
        accepted = torch.rand(8, generator=generator) < truth[buckets]
        rates.observe(buckets, accepted, torch.ones(8, dtype=torch.bool))
    assert (rates.rate(torch.arange(3)) - truth).abs().max() < 0.04


def test_a_bucket_no_longer_tried_returns_to_its_prior() -> None:
    rates, yes = table(0.9), torch.ones(4, dtype=torch.bool)
    for _ in range(50):
        rates.observe(torch.zeros(4, dtype=torch.int64), yes, yes)
    assert rates.rate(torch.tensor(0)) > 0.9
    for _ in range(100):
        rates.observe(torch.ones(4, dtype=torch.int64), yes, yes)
    assert abs(float(rates.rate(torch.tensor(0))) - 0.25) < 0.01
