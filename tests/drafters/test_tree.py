"""Trees, their ancestors and paths."""

import torch
from hypothesis import given

from drafters.tree import MAX_DEPTH, ROOT, DraftTree, path_tokens
from kernels.trees import ancestor_matrix
from tests.drafters.trees import draft_trees, path_to


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
