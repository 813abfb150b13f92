"""Ops on trees, the reference's and the compiled ones, against plain dictionaries from paths to survival."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import ops
from kernels.ops import REFERENCE, Ops
from kernels.tree_attention import MAX_DEPTH
from kernels.trees import ROOT, DraftTree, fates, select_nodes
from tests.drafters.trees import draft_trees, path_to

KINDS = pytest.mark.parametrize("kind", [REFERENCE, ops.on(torch.device("cpu"))], ids=["reference", "compiled"])

Path = tuple[int, ...]


def joined_trees(one: DraftTree, other: DraftTree) -> DraftTree:
    """Two trees of each sequence as one raw tree, not merged yet."""
    below = torch.where(other.parents < 0, ROOT, other.parents + one.width)
    tokens, parents, depths, survival = (
        torch.cat(parts, dim=1) for parts in zip(one[:4], (other.tokens, below, *other[2:4]), strict=True)
    )
    return DraftTree(tokens, parents, depths, survival, one.num_nodes + other.num_nodes)


def tree_of(nodes: list[tuple[int, int, float]]) -> DraftTree:
    """One sequence's tree from (token, parent, conditional probability)."""
    depths: list[int] = []
    survival: list[float] = []
    for _, parent, odds in nodes:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
        survival.append((survival[parent] if parent >= 0 else 1.0) * odds)
    tokens, parents = ([node[field] for node in nodes] for field in (0, 1))
    return DraftTree(
        tokens=torch.tensor([tokens]),
        parents=torch.tensor([parents]),
        depths=torch.tensor([depths]),
        survival=torch.tensor([survival]),
        num_nodes=torch.tensor([len(nodes)]),
    )


def paths_of(tree: DraftTree) -> dict[Path, float]:
    """Survival by path of tokens."""
    paths: list[Path] = []
    for node in range(int(tree.num_nodes)):
        parent = int(tree.parents[0, node])
        assert parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), int(tree.tokens[0, node])))
        assert int(tree.depths[0, node]) == len(paths[-1])
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, tree.survival[0].tolist(), strict=False))


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    nodes: list[tuple[int, int, float]] = []
    depths: list[int] = []
    for number in range(draw(st.integers(1, 12))):
        parent = draw(st.integers(-1, number - 1).filter(lambda p: p < 0 or depths[p] < MAX_DEPTH))
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
        nodes.append((draw(st.integers(0, 2)), parent, draw(st.sampled_from([0.1, 0.35, 0.5, 0.9]))))
    return tree_of(nodes)


def expected_of(trees: list[DraftTree]) -> dict[Path, float]:
    best: dict[Path, float] = {}
    for tree in trees:
        paths: list[Path] = []
        for node in range(int(tree.num_nodes)):
            parent = int(tree.parents[0, node])
            paths.append((*(paths[parent] if parent >= 0 else ()), int(tree.tokens[0, node])))
            best[paths[-1]] = max(best.get(paths[-1], 0.0), float(tree.survival[0, node]))
    return best


@KINDS
@given(trees(), trees())
@settings(max_examples=200, deadline=None)
def test_each_path_once_with_the_larger_survival(kind: Ops, one: DraftTree, other: DraftTree) -> None:
    raw = joined_trees(one, other)
    merged, chosen = kind.merge_trees(raw, 64)
    assert paths_of(merged) == expected_of([one, other])
    count = int(merged.num_nodes)
    assert raw.tokens.gather(1, chosen)[0, :count].tolist() == merged.tokens[0, :count].tolist()


@KINDS
@given(trees(), trees(), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_a_narrow_result_keeps_the_likeliest(kind: Ops, one: DraftTree, other: DraftTree, width: int) -> None:
    merged, _ = kind.merge_trees(joined_trees(one, other), width)
    everything = sorted(expected_of([one, other]).values(), reverse=True)
    assert sorted(paths_of(merged).values(), reverse=True) == everything[:width]


@KINDS
def test_absent_nodes_stay_away(kind: Ops) -> None:
    tree = tree_of([(5, -1, 0.9), (6, -1, 0.0)])
    for merge in (kind.merge_trees, kind.likeliest_nodes):
        merged, _ = merge(tree, 4)
        assert paths_of(merged) == {(5,): tree.survival[0, 0].item()}
        assert merged.width == 2


def equal(one: tuple[DraftTree, Tensor], other: tuple[DraftTree, Tensor]) -> bool:
    """Whether trees are the same, and the places of their nodes; those of padding mean nothing."""
    (tree, chosen), (same, others) = one, other
    return all(map(torch.equal, tree, same)) and torch.equal(chosen[tree.valid], others[tree.valid])


@given(draft_trees(), st.integers(1, 14))
def test_compiled_ops_cut_as_the_reference(tree: DraftTree, width: int) -> None:
    compiled = ops.on(torch.device("cpu"))
    if tree.width:
        assert equal(compiled.merge_trees(tree, width), REFERENCE.merge_trees(tree, width))
        assert equal(compiled.likeliest_nodes(tree, width), REFERENCE.likeliest_nodes(tree, width))


@KINDS
@given(tree=draft_trees())
def test_ancestors_are_the_nodes_on_each_path(kind: Ops, tree: DraftTree) -> None:
    matrix = kind.ancestor_matrix(tree.parents)
    for b, count in enumerate(tree.num_nodes.tolist()):
        for i in range(count):
            assert matrix[b, i].nonzero().flatten().tolist() == path_to(tree, b, i)


@KINDS
def test_the_deepest_chain_is_seen_whole(kind: Ops) -> None:
    parents = torch.arange(-1, MAX_DEPTH - 1)[None]
    assert (kind.ancestor_matrix(parents)[0] == torch.ones(MAX_DEPTH, MAX_DEPTH).tril().bool()).all()


@KINDS
def test_what_is_on_the_committed_text_is_found(kind: Ops) -> None:
    tree = tree_of([(5, -1, 0.9), (6, -1, 0.5), (7, 0, 0.5), (7, 1, 0.5), (8, 2, 0.5)])
    committed = torch.tensor([[5, 7, 8, -1]])
    for count, tried, came_true in ((2, [1, 1, 1, 0, 0], [1, 0, 1, 0, 0]), (3, [1, 1, 1, 0, 1], [1, 0, 1, 0, 1])):
        found = kind.fates(tree.tokens, tree.parents, tree.depths, committed, torch.tensor([count]))
        assert found.tried.int().tolist() == [tried]  # of what stands behind the known text nothing is known
        assert found.came_true.int().tolist() == [came_true]


@KINDS
@given(tree=draft_trees(), data=st.data())
def test_a_node_is_tried_when_its_parent_came_true(kind: Ops, tree: DraftTree, data: st.DataObject) -> None:
    longest = data.draw(st.integers(1, 6))
    text = torch.tensor([[data.draw(st.integers(0, 4)) for _ in range(longest)] for _ in tree.num_nodes])
    counts = torch.tensor([data.draw(st.integers(0, longest)) for _ in tree.num_nodes])
    tried, came_true = kind.fates(tree.tokens, tree.parents, tree.depths, text, counts)
    for b, count in enumerate(counts.tolist()):
        for i in range(tree.width):
            path = [int(tree.tokens[b, node]) for node in path_to(tree, b, i)] if i < tree.num_nodes[b] else []
            spoken = text[b, :count].tolist()
            assert bool(came_true[b, i]) == bool(path and path == spoken[: len(path)])
            assert bool(tried[b, i]) == bool(path and len(path) <= count and path[:-1] == spoken[: len(path) - 1])


def test_texts_longer_than_any_tree_are_compared_as_far_as_trees_reach() -> None:
    text, count = torch.zeros(1, MAX_DEPTH + 1, dtype=torch.int64), torch.tensor([MAX_DEPTH + 1])
    chain = torch.arange(MAX_DEPTH)[None]
    tried, came_true = fates(torch.zeros_like(chain), chain - 1, chain + 1, text, count)
    assert tried.tolist() == came_true.tolist() == [[True] * MAX_DEPTH]


def likeliest(tree: DraftTree, b: int, count: int) -> list[int]:
    nodes = range(int(tree.num_nodes[b]))
    return sorted(nodes, key=lambda i: (-float(tree.survival[b, i]), i))[:count]


def path_names(tree: DraftTree, b: int, node: int) -> list[tuple[int, float]]:
    return [(int(tree.tokens[b, j]), float(tree.survival[b, j])) for j in path_to(tree, b, node)]


@given(tree=draft_trees(), data=st.data())
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


@given(tree=draft_trees(), data=st.data())
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
