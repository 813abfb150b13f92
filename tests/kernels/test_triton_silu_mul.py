"""Gates of the device kernel against the reference."""

import pytest
import torch

from kernels import silu_mul as reference
from kernels.triton.silu_mul import silu_mul

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6}  # two roundings, each of which may fall to the other side


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(2,), (1, 1, 96), (1, 5, 2 * 1536), (3, 2 * 1025), (1, 2, 28_672)])
def test_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    joined = (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 5).to(dtype).to(device)
    expected = reference.silu_mul(joined)
    torch.testing.assert_close(silu_mul(joined), expected, atol=1e-30, rtol=TOLERANCES[dtype])


def test_large_gates_are_open_or_shut(device: str) -> None:
    gate, up = torch.tensor([80.0, -80.0, 0.0], device=device), torch.tensor([3.0, 3.0, 3.0], device=device)
    opened, shut, nothing = silu_mul(torch.cat([gate, up])).tolist()
    assert (opened, nothing) == (240.0, 0.0)
    assert -1e-30 < shut <= 0.0


def test_no_rows(device: str) -> None:
    assert silu_mul(torch.zeros(1, 0, 8, device=device)).shape == (1, 0, 4)
