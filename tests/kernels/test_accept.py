"""The acceptance walk against one written with a stack of ifs."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.accept import accept
from kernels.tree_attention import MAX_DEPTH

Tree = tuple[list[int], list[int], list[int]]  # tokens, parents, target tokens (one more)


def _walk(tokens: list[int], parents: list[int], targets: list[int]) -> tuple[list[int], int]:
    """The accepted path of one tree, and the bonus token."""
    path: list[int] = []
    here = -1
    while len(path) < MAX_DEPTH:
        wanted = targets[here + 1]
        agreeing = [i for i, parent in enumerate(parents) if parent == here and tokens[i] == wanted]
        if not agreeing:
            break
        here = agreeing[0]
        path.append(here)
    return path, targets[here + 1]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    nodes = draw(st.integers(0, 24))
    vocab = draw(st.integers(1, 3))
    tokens = [draw(st.integers(0, vocab - 1)) for _ in range(nodes)]
    chainlike = draw(st.booleans())
    parents = [draw(st.integers(max(-1, i - 3), i - 1) if chainlike else st.integers(-1, i - 1)) for i in range(nodes)]
    targets = [draw(st.integers(0, vocab - 1)) for _ in range(nodes + 1)]
    return tokens, parents, targets


def _padded(batch: list[Tree], nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Padding looks like children of the root that carry the wanted token: only num_nodes tells."""
    tokens = torch.tensor([t + [g[0]] * (nodes - len(t)) for t, _, g in batch], dtype=torch.int64)
    parents = torch.tensor([p + [-1] * (nodes - len(p)) for _, p, _ in batch], dtype=torch.int64)
    targets = torch.tensor([g + [0] * (nodes + 1 - len(g)) for _, _, g in batch], dtype=torch.int64)
    counts = torch.tensor([len(t) for t, _, _ in batch])
    return tokens.view(len(batch), nodes), parents.view(len(batch), nodes), counts, targets


@settings(max_examples=300, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=4), st.integers(0, 3))
def test_equals_the_brute_force_walk(batch: list[Tree], padding: int) -> None:
    nodes = max(len(tokens) for tokens, _, _ in batch) + padding
    accepted = accept(*_padded(batch, nodes))
    assert accepted.path.shape == (len(batch), min(nodes, MAX_DEPTH))
    for i, tree in enumerate(batch):
        path, bonus = _walk(*tree)
        assert accepted.num_accepted[i].item() == len(path)
        assert accepted.path[i].tolist() == path + [-1] * (accepted.path.shape[1] - len(path))
        assert accepted.bonus[i].item() == bonus


def test_zero_nodes_is_plain_decoding() -> None:
    none = torch.zeros(2, 0, dtype=torch.int64)
    accepted = accept(none, none, torch.zeros(2, dtype=torch.int64), torch.tensor([[7], [9]]))
    assert accepted.path.shape == (2, 0)
    assert accepted.num_accepted.tolist() == [0, 0]
    assert accepted.bonus.tolist() == [7, 9]


def test_first_of_equal_siblings_counts() -> None:
    tokens, parents = torch.tensor([[4, 4, 5, 5]]), torch.tensor([[-1, -1, 0, 1]])
    targets = torch.tensor([[4, 5, 5, 8, 9]])
    accepted = accept(tokens, parents, torch.tensor([4]), targets)
    assert accepted.path.tolist() == [[0, 2, -1, -1]]
    assert accepted.bonus.tolist() == [8]


def test_full_chain_is_accepted_to_the_depth_limit() -> None:
    nodes = MAX_DEPTH + 3
    chain = torch.arange(nodes)[None]
    targets = torch.arange(nodes + 1)[None]
    accepted = accept(chain, chain - 1, torch.tensor([nodes]), targets)
    assert accepted.path.tolist() == [list(range(MAX_DEPTH))]
    assert accepted.bonus.tolist() == [MAX_DEPTH]
