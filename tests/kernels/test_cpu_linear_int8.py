"""Products in 8 bits: those of the reference up to rounding, close to those of whole weights, `==` in company."""

import pytest
import torch

from kernels import ops
from kernels.ops import REFERENCE

CPU = ops.on(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "out"), [(64, 32), (576, 960), (50, 33), (1536, 70)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_is_the_reference(width: int, out: int, with_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    weight = (torch.randn(out, width, generator=generator) / width**0.5).to(dtype)
    bias = torch.randn(out, generator=generator).to(dtype) if with_bias else None
    x = torch.randn(2, 7, width, generator=generator).to(dtype)
    x[0, 0] = 0
    found, expected = CPU.plan_linear_int8(weight, bias)(x), REFERENCE.plan_linear_int8(weight, bias)(x)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    whole = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert (found.float() - whole).norm() < 0.02 * whole.norm()


def test_a_row_has_the_same_bits_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    product = CPU.plan_linear_int8(torch.randn(70, 96, generator=generator).bfloat16(), None)
    x = torch.randn(40, 96, generator=generator).bfloat16()
    whole = product(x)
    for first in range(0, 40, 3):
        for count in (1, 2, 5, 13, 30):
            assert torch.equal(product(x[first : first + count]), whole[first : first + count])


def test_a_row_that_is_broken_stays_so_and_breaks_no_other() -> None:
    product = CPU.plan_linear_int8(torch.randn(40, 64), None)
    x = torch.randn(3, 64)
    expected = product(x)
    x[1, 5] = torch.nan
    assert product(x)[1].isnan().all()
    assert torch.equal(product(x)[0::2], expected[0::2])
    x[1, 5] = torch.inf
    assert not product(x)[1].isfinite().any()
