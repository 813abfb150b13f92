"""Compiled products against the reference, and a row's bits alone against the same row in company."""

import pytest
import torch

from kernels.cpu.linear import plan_linear

DTYPES = [torch.bfloat16, torch.float32]


def _layer(width: int, out: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=generator) / width**0.5
    return weight.to(dtype), torch.randn(out, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "out"), [(2, 1), (16, 31), (64, 32), (576, 960), (1536, 577), (48, 49153)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_the_reference_s(width: int, out: int, dtype: torch.dtype, biased: bool) -> None:
    weight, bias = _layer(width, out, dtype)
    x = torch.randn(17, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
    found = plan_linear(weight, bias if biased else None)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_bits_that_they_have_alone(dtype: torch.dtype) -> None:
    weight, bias = _layer(576, 1000, dtype)
    product = plan_linear(weight, bias)
    x = torch.randn(150, 576, generator=torch.Generator().manual_seed(2)).to(dtype)
    alone = torch.cat([product(row[None]) for row in x])
    for count in (2, 3, 5, 11, 12, 13, 24, 25, 37, 64, 149, 150):
        assert torch.equal(product(x[-count:]), alone[-count:])


def test_any_layout_and_shape_of_rows() -> None:
    weight, _ = _layer(64, 40, torch.float32)
    x = torch.randn(64, 3, 5).permute(1, 2, 0)
    assert torch.equal(plan_linear(weight, None)(x), plan_linear(weight, None)(x.reshape(15, 64)).view(3, 5, 40))
