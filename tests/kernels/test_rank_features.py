"""Rank features by all kernels against the reference, and against double precision."""

import pytest
import torch
from torch import Tensor

from kernels.lattice import TOP
from kernels.ops import REFERENCE, Ops


def _scores(shape: tuple[int, ...], dtype: torch.dtype, spread: float = 2.0) -> Tensor:
    """Scores without equals at the top, whose places are random."""
    generator = torch.Generator().manual_seed(sum(shape))
    scores = torch.randn(shape, generator=generator) * spread
    best = scores.topk(TOP + 2, dim=-1)
    scores.scatter_(-1, best.indices, best.values[..., :1] + torch.arange(TOP + 2, 0, -1) * 0.25)
    return scores.to(dtype)


Everywhere = tuple[Ops, str]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 12), (3, 1023), (2, 1024), (2, 3, 4, 1025), (5, 4001), (1, 32_000), (12, 300)])
def test_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype, everywhere: Everywhere) -> None:
    ops, device = everywhere
    scores = _scores(shape, dtype)
    expected, expected_ids = REFERENCE.rank_features(scores)
    features, ids = ops.rank_features(scores.to(device))
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(features.cpu(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_entropy_is_that_of_double_precision(spread: float, everywhere: Everywhere) -> None:
    ops, device = everywhere
    scores = _scores((4, 5000), torch.float32, spread) - 700
    log_q = scores.double().log_softmax(-1)
    features, _ = ops.rank_features(scores.to(device))
    expected = -(log_q.exp() * log_q).sum(-1)
    torch.testing.assert_close(features[:, -1].cpu().double(), expected, atol=2e-5, rtol=2e-5)


def test_of_equal_scores_the_lower_id_ranks_first(everywhere: Everywhere) -> None:
    ops, device = everywhere
    scores = torch.zeros(2, 3000, device=device)
    scores[1, [2999, 1500, 40, 2000]] = 1.0
    _, ids = ops.rank_features(scores)
    assert ids[0].tolist() == list(range(10))
    assert ids[1].tolist() == [40, 1500, 2000, 2999, 0, 1, 2, 3, 4, 5]


def test_rising_scores_displace_every_rank(everywhere: Everywhere) -> None:
    ops, device = everywhere
    _, ids = ops.rank_features((torch.arange(5000, device=device) / 100)[None])
    assert ids[0].tolist() == list(range(4999, 4989, -1))


def test_a_row_does_not_depend_on_its_company(everywhere: Everywhere) -> None:
    ops, device = everywhere
    scores = _scores((9, 2500), torch.float32).to(device)
    together, _ = ops.rank_features(scores)
    assert torch.equal(torch.cat([ops.rank_features(scores[row : row + 1])[0] for row in range(9)]), together)


def test_no_rows(everywhere: Everywhere) -> None:
    ops, device = everywhere
    features, ids = ops.rank_features(torch.zeros(0, 4, 100, device=device))
    assert features.shape == (0, 4, 15)
    assert ids.shape == (0, 4, 10)
