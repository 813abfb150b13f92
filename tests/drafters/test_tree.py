"""Trees, their ancestors and paths; merged by path against plain dictionaries from paths to survival."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.tree import (
    MAX_DEPTH,
    ROOT,
    Candidates,
    DraftTree,
    ancestor_matrix,
    came_true,
    joined_trees,
    merge_trees,
    path_hashes,
    path_tokens,
    prefix_hashes,
    select_nodes,
    survival_order,
)
from tests.drafters.trees import draft_trees, path_to


@given(draft_trees())
def test_ancestors_are_the_nodes_on_each_path(tree: DraftTree) -> None:
    matrix = ancestor_matrix(tree.parents)
    for b, count in enumerate(tree.num_nodes.tolist()):
        for i in range(count):
            assert matrix[b, i].nonzero().flatten().tolist() == path_to(tree, b, i)


@given(draft_trees())
def test_path_tokens_stand_in_order_from_the_root(tree: DraftTree) -> None:
    paths = path_tokens(tree.tokens, ancestor_matrix(tree.parents), MAX_DEPTH)
    assert (paths[:, 0] == -1).all()
    for b, count in enumerate(tree.num_nodes.tolist()):
        for i in range(count):
            tokens = [int(tree.tokens[b, j]) for j in path_to(tree, b, i)]
            assert paths[b, i + 1].tolist() == tokens + [-1] * (MAX_DEPTH - len(tokens))


def test_the_deepest_chain_is_seen_whole() -> None:
    parents = torch.arange(-1, MAX_DEPTH - 1)[None]
    assert (ancestor_matrix(parents)[0] == torch.ones(MAX_DEPTH, MAX_DEPTH).tril().bool()).all()


def test_paths_are_cut_at_the_depth_asked_for() -> None:
    parents = torch.tensor([[ROOT, 0, 1]])
    paths = path_tokens(torch.tensor([[7, 8, 9]]), ancestor_matrix(parents), 2)
    assert paths.tolist() == [[[-1, -1], [7, -1], [7, 8], [7, 8]]]


Path = tuple[int, ...]


def tree_of(nodes: list[tuple[int, int, float]]) -> Candidates:
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


def paths_of(tree: Candidates) -> dict[Path, float]:
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
def trees(draw: st.DrawFn) -> Candidates:
    nodes: list[tuple[int, int, float]] = []
    depths: list[int] = []
    for number in range(draw(st.integers(1, 12))):
        parent = draw(st.integers(-1, number - 1).filter(lambda p: p < 0 or depths[p] < MAX_DEPTH))
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
        nodes.append((draw(st.integers(0, 2)), parent, draw(st.sampled_from([0.1, 0.35, 0.5, 0.9]))))
    return tree_of(nodes)


def expected_of(trees: list[Candidates]) -> dict[Path, float]:
    best: dict[Path, float] = {}
    for tree in trees:
        paths: list[Path] = []
        for node in range(int(tree.num_nodes)):
            parent = int(tree.parents[0, node])
            paths.append((*(paths[parent] if parent >= 0 else ()), int(tree.tokens[0, node])))
            best[paths[-1]] = max(best.get(paths[-1], 0.0), float(tree.survival[0, node]))
    return best


@given(st.lists(trees(), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_each_path_once_with_the_larger_survival(several: list[Candidates]) -> None:
    merged, chosen = merge_trees(joined_trees(several), max_nodes=64)
    assert paths_of(merged) == expected_of(several)
    raw = joined_trees(several)
    count = int(merged.num_nodes)
    assert raw.tokens.gather(1, chosen)[0, :count].tolist() == merged.tokens[0, :count].tolist()


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_a_narrow_result_keeps_the_likeliest(several: list[Candidates], width: int) -> None:
    merged, _ = merge_trees(joined_trees(several), max_nodes=width)
    everything = sorted(expected_of(several).values(), reverse=True)
    assert sorted(paths_of(merged).values(), reverse=True) == everything[:width]


def test_what_is_on_the_committed_text_is_found() -> None:
    tree = tree_of([(5, -1, 0.9), (6, -1, 0.5), (7, 0, 0.5), (7, 1, 0.5), (8, 2, 0.5)])
    hashes = path_hashes(tree.tokens, tree.parents, tree.depths)
    committed = torch.tensor([[5, 7, 8, -1]])
    assert came_true(hashes, committed, torch.tensor([2])).tolist() == [[True, False, True, False, False]]
    assert came_true(hashes, committed, torch.tensor([3])).tolist() == [[True, False, True, False, True]]


def test_texts_longer_than_any_tree_are_compared_as_far_as_trees_reach() -> None:
    assert prefix_hashes(torch.zeros(1, MAX_DEPTH + 1, dtype=torch.int64)).shape == (1, MAX_DEPTH)


def test_absent_nodes_stay_away() -> None:
    tree = tree_of([(5, -1, 0.9), (6, -1, 0.0)])
    merged, _ = merge_trees(tree, max_nodes=4)
    assert paths_of(merged) == {(5,): tree.survival[0, 0].item()}


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
