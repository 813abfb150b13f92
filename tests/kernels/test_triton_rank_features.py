"""Features of the device kernel against the reference, and against double precision."""

import pytest
import torch
from torch import Tensor

from kernels import rank_features as reference
from kernels.triton.rank_features import rank_features

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-5}  # bf16 scores are exact in fp32, where all sums run


def _scores(shape: tuple[int, ...], dtype: torch.dtype, spread: float = 2.0) -> Tensor:
    """Scores without equals at the top."""
    generator = torch.Generator().manual_seed(sum(shape))
    scores = torch.randn(shape, generator=generator) * spread
    best = scores.topk(12, dim=-1)
    scores.scatter_(-1, best.indices, best.values[..., :1] + torch.arange(12, 0, -1) * 0.25)
    return scores.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(1, 12), (3, 1023), (2, 1024), (2, 3, 4, 1025), (5, 4001), (1, 32_000), (12, 300)])
def test_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    scores = _scores(shape, dtype).to(device)
    features, ids = rank_features(scores)
    expected, expected_ids = reference.rank_features(scores)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(features, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_entropy_is_that_of_double_precision(spread: float, device: str) -> None:
    scores = _scores((4, 5000), torch.float32, spread) - 700
    log_q = scores.double().log_softmax(-1)
    features, _ = rank_features(scores.to(device))
    expected = -(log_q.exp() * log_q).sum(-1)
    torch.testing.assert_close(features[:, -1].cpu().double(), expected, atol=2e-5, rtol=2e-5)


def test_of_equal_scores_the_lower_id_ranks_first(device: str) -> None:
    scores = torch.zeros(2, 3000, device=device)
    scores[1, [2999, 1500, 40, 2000]] = 1.0
    _, ids = rank_features(scores)
    assert ids[0].tolist() == list(range(10))
    assert ids[1].tolist() == [40, 1500, 2000, 2999, 0, 1, 2, 3, 4, 5]


def test_rising_scores_displace_every_rank(device: str) -> None:
    scores = (torch.arange(5000, device=device) / 100)[None]
    _, ids = rank_features(scores)
    assert ids[0].tolist() == list(range(4999, 4989, -1))


def test_a_row_does_not_depend_on_its_company(device: str) -> None:
    scores = _scores((9, 2500), torch.float32).to(device)
    together, _ = rank_features(scores)
    alone = torch.cat([rank_features(scores[row : row + 1])[0] for row in range(9)])
    assert torch.equal(alone, together)


def test_no_rows(device: str) -> None:
    features, ids = rank_features(torch.zeros(0, 4, 100, device=device))
    assert features.shape == (0, 4, 15)
    assert ids.shape == (0, 4, 10)
