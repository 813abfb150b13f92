"""Linear layers by all kernels against products in double precision, and a row's bits alone against the same row in
company."""

import pytest
import torch
from torch import Tensor

from kernels.ops import Ops
from kernels.triton import linear as device_kernel

torch.set_num_threads(1)

TOLERANCES = {torch.bfloat16: 2**-7, torch.float32: 2e-5}
SHAPES = [  # columns, features
    (1, 1), (2, 1), (3, 33), (16, 31), (64, 48), (576, 100), (700, 77), (49, 999),
    pytest.param(2048, 192, marks=pytest.mark.slow),
]  # fmt: skip
Somewhere = tuple[Ops, str]


def _layer(columns: int, features: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(features, columns, generator=generator) / columns**0.5
    return weight.to(dtype).to(device), torch.randn(features, generator=generator).to(dtype).to(device)


def _rows(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [1, 17, 40])
@pytest.mark.parametrize(("columns", "features"), SHAPES)
def test_equals_the_product(columns: int, features: int, rows: int, dtype: torch.dtype, anywhere: Somewhere) -> None:
    ops, device = anywhere
    weight, bias = _layer(columns, features, dtype, device)
    x = _rows(rows, columns, dtype, device)
    product = x.double() @ weight.double().T
    for own_bias, exact in ((None, product), (bias, product + bias.double())):
        found = ops.plan_linear(weight, own_bias)(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


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


@pytest.mark.parametrize("dtype", [*TOLERANCES, torch.float16])
@pytest.mark.parametrize(("columns", "features"), [(576, 100), (1100, 70)])
def test_on_a_device_neither_company_nor_tiles_change_a_bit(
    columns: int, features: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = _layer(columns, features, dtype, device)
    product, x = device_kernel.plan_linear(weight, bias), _rows(150, columns, dtype, device)
    whole = product(x)
    for rows in (1, 20, 129):
        assert torch.equal(product(x[-rows:]), whole[-rows:])
    for tile in device_kernel._TILES if dtype == torch.bfloat16 else ():
        monkeypatch.setattr(device_kernel, "_TILES", (tile,))
        assert torch.equal(product(x), whole)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole.double(), exact, atol=2**-7, rtol=2**-7)


def test_any_layout_and_shape_of_rows(anywhere: Somewhere) -> None:
    ops, device = anywhere
    weight, _ = _layer(64, 40, torch.float32, device)
    x, product = torch.randn(64, 3, 5).to(device).permute(1, 2, 0), ops.plan_linear(weight, None)
    torch.testing.assert_close(product(x), product(x.reshape(15, 64)).view(3, 5, 40))
    assert product(x[:, :0]).shape == (3, 0, 40)


@pytest.mark.parametrize(
    ("rows", "features", "expected"),
    [
        (1, 4096, (16, 64)),
        (16, 4096, (16, 64)),
        (17, 4096, (32, 64)),
        (64, 4096, (32, 64)),  # two tiles of half the rows keep more processors busy
        (64, 6144, (64, 64)),
        (128, 4096, (64, 64)),
        (128, 28_672, (128, 128)),
        (256, 4096, (128, 64)),
        (2048, 4096, (256, 128)),
    ],
)
def test_tiles_grow_while_there_are_enough_of_them(rows: int, features: int, expected: tuple[int, int]) -> None:
    tile = device_kernel._tile_for(rows, features)
    assert (tile.rows, tile.features) == expected
