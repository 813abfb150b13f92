"""Random draft trees and brute-force answers about them, for the tests of this package."""

import torch
from hypothesis import strategies as st

from drafters.tree import MAX_DEPTH, ROOT, DraftTree


@st.composite
def draft_trees(draw: st.DrawFn, max_batch: int = 3, max_nodes: int = 12) -> DraftTree:
    """A batch of trees with parents before children, ties in survival, and padding."""
    batch, nodes = draw(st.integers(1, max_batch)), draw(st.integers(0, max_nodes))
    shape = (batch, nodes)
    tokens, depths = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    parents, survival = torch.full(shape, ROOT), torch.zeros(shape)
    counts = [draw(st.integers(0, nodes)) for _ in range(batch)]
    for b, count in enumerate(counts):
        for i in range(count):
            above = [j for j in range(i) if depths[b, j] < MAX_DEPTH]
            parent = draw(st.sampled_from([ROOT, *above]))
            parents[b, i] = parent
            depths[b, i] = 1 if parent == ROOT else depths[b, parent] + 1
            ceiling = 1.0 if parent == ROOT else float(survival[b, parent])
            survival[b, i] = ceiling * draw(st.sampled_from([1.0, 0.5, 0.25]))
            tokens[b, i] = draw(st.integers(0, 4))
    return DraftTree(tokens, parents, depths, survival, torch.tensor(counts))


def path_to(tree: DraftTree, b: int, node: int) -> list[int]:
    """Node indices from the root's child down to this node."""
    path: list[int] = []
    while node != ROOT:
        path.insert(0, node)
        node = int(tree.parents[b, node])
    return path


def assert_valid_tree(tree: DraftTree) -> None:
    """Every promise that a draft tree makes."""
    nodes = tree.tokens.shape[1]
    index = torch.arange(nodes)
    has_parent = tree.parents >= 0
    above = tree.parents.clamp(min=0)
    parent_depth = torch.where(has_parent, tree.depths.gather(1, above), 0) if nodes else tree.depths
    parent_survival = torch.where(has_parent, tree.survival.gather(1, above), 1.0) if nodes else tree.survival
    valid = tree.valid
    assert (tree.num_nodes <= nodes).all()
    assert (tree.parents < index).all()
    assert (tree.depths == (parent_depth + 1) * valid).all()
    assert (tree.depths <= MAX_DEPTH).all()
    assert (tree.survival[valid] <= parent_survival[valid]).all()
    assert (tree.survival[valid] > 0).all()
    assert not tree.tokens[~valid].any()
    assert not tree.survival[~valid].any()
    assert (tree.parents[~valid] == ROOT).all()
    assert_siblings_differ(tree)


def assert_siblings_differ(tree: DraftTree) -> None:
    """No two children of one parent carry the same token."""
    same = (tree.parents[:, :, None] == tree.parents[:, None]) & (tree.tokens[:, :, None] == tree.tokens[:, None])
    both = tree.valid[:, :, None] & tree.valid[:, None]
    assert not (same & both).tril(-1).any()
