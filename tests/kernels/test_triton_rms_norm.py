"""Norms of the device kernel against the reference."""

import pytest
import torch

from kernels import rms_norm as reference
from kernels.triton.rms_norm import rms_norm

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6}  # two roundings, each of which may fall to the other side


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(576,), (1, 64), (3, 1, 100), (1, 7, 576), (2, 5, 3, 128), (1, 2, 4096)])
def test_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(shape, generator=generator) * 30).to(dtype).to(device)
    weight = (torch.rand(shape[-1], generator=generator) * 3 - 1).to(dtype).to(device)
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, atol=0, rtol=TOLERANCES[dtype])


def test_epsilon_counts(device: str) -> None:
    x, weight = torch.full((2, 16), 1e-3, device=device), torch.ones(16, device=device)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), torch.full_like(x, 0.5**0.5), atol=0, rtol=2e-6)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_lines_may_stand_apart(dtype: torch.dtype, device: str) -> None:
    joined = torch.randn(1, 6, 10 * 32, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    heads = joined[..., 64:192].view(1, 6, 4, 32)
    weight = torch.linspace(0.5, 2, 32).to(dtype).to(device)
    assert torch.equal(rms_norm(heads, weight, 1e-6), rms_norm(heads.contiguous(), weight, 1e-6))


def test_a_row_does_not_depend_on_its_company(device: str) -> None:
    x = torch.randn(1, 33, 200, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16).to(device)
    weight = torch.ones(200, dtype=torch.bfloat16, device=device)
    alone = torch.cat([rms_norm(x[:, row : row + 1], weight, 1e-5) for row in range(33)], dim=1)
    assert torch.equal(alone, rms_norm(x, weight, 1e-5))


def test_no_rows(device: str) -> None:
    assert rms_norm(torch.zeros(1, 0, 8, device=device), torch.ones(8, device=device), 1e-5).shape == (1, 0, 8)
