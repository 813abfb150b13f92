"""Linear layers against products in double precision, and a row's bits alone against the same row in company."""

import pytest
import torch
from torch import Tensor

from kernels.cpu.library import use_threads
from kernels.ops import Ops
from kernels.triton import layers as kernel
from kernels.triton.layers import plan_linear

ON_CPU = {torch.bfloat16: 2**-8, torch.float32: 1e-5}  # half the last bit; of sums in float32, of numbers around 1
ON_A_DEVICE = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
ODD = [(1, 1), (2, 1), (3, 33), (16, 31), (64, 32), (576, 960), (1536, 577), (49, 4999)]  # columns, features
SHAPES = [(64, 48), (576, 100), (1024, 64), (1100, 70), pytest.param(2048, 192, marks=pytest.mark.slow)]
EXACT = [(576, 1000), (33, 50), (1, 3)]


def layer(columns: int, features: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(features, columns, generator=generator) / columns**0.5
    return weight.to(device, dtype), torch.randn(features, generator=generator).to(device, dtype)


def lines(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(device, dtype)


def check(weight: Tensor, bias: Tensor | None, x: Tensor, found: Tensor, *, rtol: float, atol: float) -> None:
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", ON_CPU)
@pytest.mark.parametrize(("columns", "features"), ODD)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_product(columns: int, features: int, dtype: torch.dtype, with_bias: bool, compiled: Ops) -> None:
    weight, drawn = layer(columns, features, dtype)
    x, bias = lines(17, columns, dtype), drawn if with_bias else None
    check(weight, bias, x, compiled.plan_linear(weight, bias)(x), rtol=ON_CPU[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", ON_A_DEVICE)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 130])
@pytest.mark.parametrize(("columns", "features"), SHAPES)
def test_a_device_equals_the_product(
    columns: int, features: int, rows: int, with_bias: bool, dtype: torch.dtype, device: str
) -> None:
    weight, drawn = layer(columns, features, dtype, device)
    x, bias = lines(rows, columns, dtype, device), drawn if with_bias else None
    check(weight, bias, x, plan_linear(weight, bias)(x), rtol=ON_A_DEVICE[dtype], atol=ON_A_DEVICE[dtype])


@pytest.mark.parametrize("dtype", ON_CPU)
@pytest.mark.parametrize(("columns", "features"), EXACT)
def test_a_row_does_not_depend_on_its_company(columns: int, features: int, dtype: torch.dtype, compiled: Ops) -> None:
    product, x = compiled.plan_linear(*layer(columns, features, dtype)), lines(300, columns, dtype)
    alone = torch.cat([product(row[None]) for row in x])
    for threads in (2, 1):
        use_threads(threads)
        for count in (*range(2, 30), 37, 64, 149, 300):
            assert torch.equal(product(x[-count:]), alone[-count:])


@pytest.mark.parametrize("dtype", ON_A_DEVICE)
@pytest.mark.parametrize(("columns", "features"), SHAPES)
def test_on_a_device_every_tile_and_company_gives_the_same_bits(
    columns: int, features: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    product, x = plan_linear(*layer(columns, features, dtype, device)), lines(150, columns, dtype, device)
    whole = product(x)
    for rows in (1, 20, 50, 129):
        assert torch.equal(product(x[-rows:]), whole[-rows:])
    for tile in kernel._TILES if dtype == torch.bfloat16 else ():
        monkeypatch.setattr(kernel, "_TILES", (tile,))
        assert torch.equal(product(x), whole)


def test_any_layout_and_shape_of_rows(anywhere: tuple[Ops, str]) -> None:
    ops, device = anywhere
    weight, _ = layer(64, 40, torch.float32, device)
    x, product = torch.randn(64, 3, 5, device=device).permute(1, 2, 0), ops.plan_linear(weight, None)
    torch.testing.assert_close(product(x), product(x.reshape(15, 64)).view(3, 5, 40))
    assert product(x[:, :0]).shape == (3, 0, 40)
