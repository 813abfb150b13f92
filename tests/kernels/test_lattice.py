"""The lattice of a block: what ranks are worth, who is whose parent, what survives, and where the next block starts."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import ops
from kernels.lattice import Lattice, Picked, StartNodes
from kernels.ops import REFERENCE
from kernels.survival import CEILING
from kernels.tree_attention import MAX_DEPTH
from kernels.trees import ROOT

BOTH = (REFERENCE, ops.on(torch.device("cpu")))


def grown(
    predicted: list[list[float]], origin: StartNodes | None = None, first_number: int = 0, starts: int = 0
) -> tuple[Lattice, Picked]:
    """One sequence, one block. Tokens are 10 * position + rank."""
    odds = torch.tensor([[predicted]])
    tokens = (10 * torch.arange(odds.shape[2])[:, None] + torch.arange(odds.shape[3]))[None, None]
    begun = origin or StartNodes.root(1, odds.device)
    return REFERENCE.grow_lattice(begun, tokens, odds, torch.ones_like(odds[0, 0]), first_number, 0.001, starts)


def test_the_first_ranks_are_the_spine_and_the_others_its_leaves() -> None:
    tokens, parents, depths, survival = grown([[0.5, 0.25], [0.5, 0.1]])[0].nodes()
    assert tokens.tolist() == [[0, 1, 10, 11]]
    assert parents.tolist() == [[ROOT, ROOT, 0, 0]]
    assert depths.tolist() == [[1, 1, 2, 2]]
    assert survival.tolist() == [[0.5, 0.25, 0.25, torch.tensor(0.5 * 0.1).item()]]


def test_a_later_block_hangs_below_its_start() -> None:
    origin = StartNodes(torch.tensor([[7]]), torch.tensor([[3]]), torch.tensor([[0.5]]))
    _, parents, depths, survival = grown([[0.5, 0.25], [0.5, 0.1]], origin, first_number=20)[0].nodes()
    assert parents.tolist() == [[7, 7, 20, 20]]
    assert depths.tolist() == [[4, 4, 5, 5]]
    assert survival[0, 0] == 0.25


def test_nothing_grows_deeper_than_trees_may_be() -> None:
    origin = StartNodes(torch.tensor([[0]]), torch.tensor([[MAX_DEPTH - 1]]), torch.tensor([[1.0]]))
    _, _, depths, survival = grown([[0.5, 0.25], [0.5, 0.1]], origin)[0].nodes()
    assert (survival > 0).tolist() == [[True, True, False, False]]
    assert depths.max() <= MAX_DEPTH


def test_no_node_is_certain_and_those_that_never_pay_are_absent() -> None:
    _, _, _, survival = grown([[1.0, 0.0009], [0.5, 0.0011]])[0].nodes()
    assert torch.allclose(survival, torch.tensor([[CEILING, 0.0, CEILING * 0.5, CEILING * 0.0011]]))


def test_blocks_start_where_they_are_likely_to_be_reached_and_no_one_went_on() -> None:
    # Spine 0.9, 0.81; the leaf at the first position 0.09, at the second 0.9 * 0.05.
    _, picked = grown([[0.9, 0.0901], [0.9, 0.05]], starts=3)
    assert picked.tokens.tolist() == [[10, 1, 0]]  # the end of the spine, the leaf, the middle: 0.9 * (1 - 0.9)
    assert picked.position.tolist() == [[1, 0, 0]]
    assert picked.origin.depth.tolist() == [[2, 1, 1]]
    assert picked.origin.node.tolist() == [[2, 1, 0]]


def test_starts_are_chosen_over_all_blocks_of_a_sequence() -> None:
    origin = StartNodes(torch.tensor([[0, 1]]), torch.tensor([[1, 1]]), torch.tensor([[0.9, 0.1]]))
    odds, tokens = torch.tensor([[[[0.5, 0.2]], [[0.9, 0.05]]]]), torch.arange(4).view(1, 2, 1, 2)
    _, picked = REFERENCE.grow_lattice(origin, tokens, odds, torch.ones(1, 2), 5, 0.001, 2)
    assert picked.start.tolist() == [[0, 0]]
    assert picked.origin.node.tolist() == [[5, 6]]


@given(
    seed=st.integers(0, 2**30), batch=st.integers(1, 16), begun=st.integers(1, 4), block=st.integers(1, 4),
    starts=st.integers(0, 50),
)  # fmt: skip
def test_blocks_grow_alike(seed: int, batch: int, begun: int, block: int, starts: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    nodes, depths = torch.randint(-1, 40, (2, batch, begun), generator=drawn)
    survival = torch.rand(batch, begun, generator=drawn)
    survival[torch.rand(batch, begun, generator=drawn) < 0.2] = 0.0
    depths = torch.where(depths > 35, MAX_DEPTH - 2, depths.clamp(min=0))
    shape = (batch, begun, block, 10)
    tokens, predicted = torch.randint(1000, shape, generator=drawn), torch.rand(shape, generator=drawn)
    trust = 0.5 + torch.rand(block, 10, generator=drawn)
    given_there = StartNodes(nodes, depths, survival), tokens, predicted, trust, 17, 1 / 400, starts
    (expected, wanted), (found, picked) = (kind.grow_lattice(*given_there) for kind in BOTH)
    for one, other in zip(found.nodes(), expected.nodes(), strict=True):
        assert torch.allclose(one, other)
    assert torch.allclose(picked.origin.survival, wanted.origin.survival)
    for one, other in zip((*picked.origin[:2], *picked[1:]), (*wanted.origin[:2], *wanted[1:]), strict=True):
        assert torch.equal(one, other)


@given(seed=st.integers(0, 2**30), rows=st.integers(1, 70))
def test_classes_are_spread_alike(seed: int, rows: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    logits, scores = 9 * torch.randn(rows, 4, generator=drawn), 9 * torch.randn(rows, 40, generator=drawn)
    features, _ = REFERENCE.rank_features(scores)
    expected, found = (kind.spread_classes(logits, features) for kind in BOTH)
    assert torch.allclose(found, expected, atol=1e-6)
