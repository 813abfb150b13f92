"""Linear layers of a CPU against products in double precision, and, where they are compiled, a row's bits alone against
the same row in company."""

import pytest
import torch
from torch import Tensor

from kernels.ops import Ops

TOLERANCES = {torch.bfloat16: 2**-8, torch.float32: 1e-5}  # half the last bit; of sums in float32, of numbers around 1
SHAPES = [(1, 1), (2, 1), (3, 33), (16, 31), (64, 32), (576, 960), (1536, 577), (49, 4999)]  # columns, features


def _layer(columns: int, features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(features, columns, generator=generator) / columns**0.5
    return weight.to(dtype), torch.randn(features, generator=generator).to(dtype)


def _rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("columns", "features"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_product(columns: int, features: int, dtype: torch.dtype, with_bias: bool, on_cpu: Ops) -> None:
    weight, bias = _layer(columns, features, dtype)
    x = _rows(17, columns, dtype)
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    found = on_cpu.plan_linear(weight, bias if with_bias else None)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=TOLERANCES[dtype], atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("columns", "features"), [(576, 1000), (33, 50), (1, 3)])
def test_a_row_does_not_depend_on_its_company(
    columns: int, features: int, dtype: torch.dtype, threads: int, compiled: Ops
) -> None:
    weight, bias = _layer(columns, features, dtype)
    product, x = compiled.plan_linear(weight, bias), _rows(300, columns, dtype)
    alone = torch.cat([product(row[None]) for row in x])
    torch.set_num_threads(threads)
    for count in (*range(2, 30), 37, 64, 149, 300):
        assert torch.equal(product(x[-count:]), alone[-count:])
    torch.set_num_threads(1)


def test_any_layout_and_shape_of_rows(on_cpu: Ops) -> None:
    weight, _ = _layer(64, 40, torch.float32)
    x, product = torch.randn(64, 3, 5).permute(1, 2, 0), on_cpu.plan_linear(weight, None)
    torch.testing.assert_close(product(x), product(x.reshape(15, 64)).view(3, 5, 40))
    assert product(x[:, :0]).shape == (3, 0, 40)
