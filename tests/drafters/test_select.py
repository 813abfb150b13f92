import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.tree import DraftTree, select_nodes, survival_order
from tests.drafters.trees import draft_trees, path_to


def likeliest(tree: DraftTree, b: int, count: int) -> list[int]:
    nodes = range(int(tree.num_nodes[b]))
    return sorted(nodes, key=lambda i: (-float(tree.survival[b, i]), i))[:count]


def path_names(tree: DraftTree, b: int, node: int) -> list[tuple[int, float]]:
    return [(int(tree.tokens[b, j]), float(tree.survival[b, j])) for j in path_to(tree, b, node)]


@given(draft_trees(), st.data())
def test_select_keeps_the_likeliest_nodes_as_a_tree(tree: DraftTree, data: st.DataObject) -> None:
    keep = [data.draw(st.integers(0, tree.tokens.shape[1] + 2)) for _ in tree.num_nodes]
    kept, _ = select_nodes(tree, torch.tensor(keep), tree.width)
    for b, limit in enumerate(keep):
        oracle = sorted(likeliest(tree, b, limit), key=lambda i: int(tree.depths[b, i]))
        assert kept.num_nodes[b] == len(oracle)
        for new, old in enumerate(oracle):
            assert kept.parents[b, new] < new
            assert kept.depths[b, new] == tree.depths[b, old]
        assert sorted(path_names(kept, b, i) for i in range(len(oracle))) == sorted(
            path_names(tree, b, i) for i in oracle
        )


@given(draft_trees(), st.data())
def test_select_orders_by_depth_then_survival_and_pads(tree: DraftTree, data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, 8))
    kept, _ = select_nodes(tree, torch.full_like(tree.num_nodes, keep), keep)
    assert kept.tokens.shape[1] == min(keep, tree.tokens.shape[1])
    for b, count in enumerate(kept.num_nodes.tolist()):
        order = [(int(kept.depths[b, i]), -float(kept.survival[b, i])) for i in range(count)]
        assert order == sorted(order)
    padding = ~kept.valid
    assert not kept.tokens[padding].any()
    assert not kept.depths[padding].any()
    assert not kept.survival[padding].any()
    assert (kept.parents[padding] == -1).all()


@given(draft_trees(), st.data())
def test_survival_order_sorts_the_whole_batch(tree: DraftTree, data: st.DataObject) -> None:
    limits = [data.draw(st.integers(0, tree.tokens.shape[1] + 2)) for _ in tree.num_nodes]
    survival, owners = survival_order(tree, torch.tensor(limits))
    oracle = [(-float(tree.survival[b, i]), b) for b in range(len(limits)) for i in likeliest(tree, b, limits[b])]
    total = len(oracle)
    assert [(-s, b) for s, b in zip(survival.tolist(), owners.tolist(), strict=True)][:total] == sorted(oracle)
    assert (owners[total:] == -1).all()
    assert not survival[total:].any()


@given(draft_trees(), st.integers(0, 20))
def test_any_prefix_of_the_common_order_is_a_set_of_trees(tree: DraftTree, total: int) -> None:
    _, owners = survival_order(tree, tree.num_nodes)
    owners = owners[:total]
    keep = torch.bincount(owners[owners >= 0], minlength=len(tree.num_nodes))
    kept, _ = select_nodes(tree, keep, tree.width)
    assert (kept.num_nodes == keep).all()
    assert (kept.parents < torch.arange(kept.tokens.shape[1])).all()
