"""Trees, their ancestors and paths."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.tree import MAX_DEPTH, ROOT, DraftTree, path_tokens, survival_order
from kernels.trees import ancestor_matrix, select_nodes
from tests.drafters.trees import draft_trees, path_to
from tests.kernels.test_trees import likeliest


@given(draft_trees())
def test_path_tokens_stand_in_order_from_the_root(tree: DraftTree) -> None:
    paths = path_tokens(tree.tokens, ancestor_matrix(tree.parents), MAX_DEPTH)
    assert (paths[:, 0] == -1).all()
    for b, count in enumerate(tree.num_nodes.tolist()):
        for i in range(count):
            tokens = [int(tree.tokens[b, j]) for j in path_to(tree, b, i)]
            assert paths[b, i + 1].tolist() == tokens + [-1] * (MAX_DEPTH - len(tokens))


def test_paths_are_cut_at_the_depth_asked_for() -> None:
    parents = torch.tensor([[ROOT, 0, 1]])
    paths = path_tokens(torch.tensor([[7, 8, 9]]), ancestor_matrix(parents), 2)
    assert paths.tolist() == [[[-1, -1], [7, -1], [7, 8], [7, 8]]]


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
