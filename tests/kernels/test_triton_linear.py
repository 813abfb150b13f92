"""Linear layers of the device kernel against the reference, and a row's bits against those it has in company."""

import pytest
import torch
from torch import Tensor

from kernels import linear as reference
from kernels.triton import linear as kernel
from kernels.triton.linear import plan_linear

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = [
    (64, 48),
    (576, 100),
    (1024, 64),
    (1100, 70),
    pytest.param(2048, 192, marks=pytest.mark.slow),
]  # columns, features


def layer(columns: int, features: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(features, columns, generator=generator) / columns**0.5
    return weight.to(dtype).to(device), torch.randn(features, generator=generator).to(dtype).to(device)


def lines(rows: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=generator).to(dtype).to(device)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 130])
@pytest.mark.parametrize(("columns", "features"), SHAPES)
def test_equals_the_reference(
    columns: int, features: int, rows: int, with_bias: bool, dtype: torch.dtype, device: str
) -> None:
    weight, bias = layer(columns, features, dtype, device)
    x, given = lines(rows, columns, dtype, device), bias if with_bias else None
    expected = reference.plan_linear(weight.double(), None if given is None else given.double())(x.double())
    found = plan_linear(weight, given)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("columns", "features"), SHAPES)
def test_a_row_does_not_depend_on_its_company(columns: int, features: int, dtype: torch.dtype, device: str) -> None:
    weight, bias = layer(columns, features, dtype, device)
    product, x = plan_linear(weight, bias), lines(150, columns, dtype, device)
    whole = product(x)
    for rows in (1, 20, 50, 129):
        assert torch.equal(product(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize(("columns", "features"), SHAPES[1:4])
def test_every_tile_gives_the_same_bits(
    columns: int, features: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = layer(columns, features, torch.bfloat16, device)
    product, x = plan_linear(weight, bias), lines(150, columns, torch.bfloat16, device)
    expected = product(x)
    for tile in kernel._TILES:
        monkeypatch.setattr(kernel, "_TILES", (tile,))
        assert torch.equal(product(x), expected)


def test_shapes_are_kept(device: str) -> None:
    weight, _ = layer(64, 48, torch.float32, device)
    product = plan_linear(weight, None)
    assert product(torch.ones(1, 3, 64, device=device)).shape == (1, 3, 48)
    assert product(torch.ones(1, 0, 64, device=device)).shape == (1, 0, 48)


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
    tile = kernel._tile_for(rows, features)
    assert (tile.rows, tile.features) == expected
