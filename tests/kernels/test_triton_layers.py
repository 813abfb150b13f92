"""Ops of a decoder layer by the device kernels, against the references."""

import pytest
import torch
from torch import Tensor

from kernels.ops import REFERENCE
from kernels.triton.layers import add_rms_norm, rotary_store, silu_mul
from tests.kernels.layer_parts import gate_bounds, norm_bounds, rotary_parts, within

DTYPES = [torch.float32, torch.bfloat16]


def _rows(shape: tuple[int, int], dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * spread).to(dtype)


def _weight(width: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(width, generator=torch.Generator().manual_seed(width)) * 3 - 1).to(dtype)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (3, 100), (7, 576), (2, 4096)])
def test_sums_are_added_and_normed(shape: tuple[int, int], dtype: torch.dtype, added: bool, device: str) -> None:
    hidden, delta, weight = _rows(shape, dtype), _rows(shape, dtype, 0.7).flip(0), _weight(shape[1], dtype)
    expected = hidden + delta if added else hidden.clone()
    hidden = hidden.to(device)
    found = add_rms_norm(hidden, delta.to(device) if added else None, weight.to(device), 1e-5)
    assert torch.equal(hidden.cpu(), expected)
    assert within(found.cpu(), norm_bounds(expected, weight, 1e-5))


def test_epsilon_counts(device: str) -> None:
    x, weight = torch.full((2, 16), 1e-3, device=device), torch.ones(16, device=device)
    torch.testing.assert_close(add_rms_norm(x, None, weight, 1e-6), torch.full_like(x, 0.5**0.5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (1, 96), (5, 2 * 1536), (3, 2 * 1025), (2, 28_672)])
def test_gates(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    joined = _rows(shape, dtype, 6.0)
    assert within(silu_mul(joined.to(device)).cpu(), gate_bounds(joined))


def test_large_gates_are_open_or_shut(device: str) -> None:
    opened, shut, nothing = silu_mul(torch.tensor([[80.0, -80.0, 0.0, 3.0, 3.0, 3.0]], device=device))[0].tolist()
    assert (opened, nothing) == (240.0, 0.0)
    assert -1e-30 < shut <= 0.0


@pytest.mark.parametrize("pool_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3), (4, 1), (2, 2)])
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (5, 128), (12, 24)])
def test_rows_are_rotated_and_stored(
    rows: int, dim: int, heads: tuple[int, int], dtype: torch.dtype, pool_dtype: torch.dtype, device: str
) -> None:
    expected = rotary_parts(rows, heads, dim, dtype)
    expected["pool"] = expected["pool"].to(pool_dtype)
    given = {name: value.clone().to(device) for name, value in expected.items()}
    found = rotary_store(**given, query_heads=heads[0], head_norms=None, epsilon=0.0)
    query = REFERENCE.rotary_store(**expected, query_heads=heads[0], head_norms=None, epsilon=0.0)
    assert torch.equal(found.cpu(), query)
    assert torch.equal(given["pool"].cpu(), expected["pool"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24, 128])
def test_heads_are_normed_before_they_are_rotated(dim: int, dtype: torch.dtype, device: str) -> None:
    """A norm may fall to the other side of a rounding, and so may each product and their sum."""
    expected = rotary_parts(7, (4, 2), dim, dtype)
    norms = (_weight(dim, dtype), _weight(dim + 1, dtype)[1:].clone())
    given = {name: value.clone().to(device) for name, value in expected.items()}
    query = REFERENCE.rotary_store(**expected, query_heads=4, head_norms=norms, epsilon=1e-5)
    on_device = (norms[0].to(device), norms[1].to(device))
    found = rotary_store(**given, query_heads=4, head_norms=on_device, epsilon=1e-5)
    largest = 4 * query.abs().max().item() * torch.finfo(dtype).eps
    torch.testing.assert_close(found.cpu(), query, atol=largest, rtol=0)
    torch.testing.assert_close(given["pool"].cpu(), expected["pool"], atol=largest, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_company(dtype: torch.dtype, device: str) -> None:
    x, weight = _rows((20, 200), dtype).to(device), _weight(200, dtype).to(device)
    gates, norms = silu_mul(x), add_rms_norm(x.clone(), x.flip(0), weight, 1e-5)
    parts = {name: value.to(device) for name, value in rotary_parts(20, (3, 1), 24, dtype).items()}
    head_norms = (weight[:24].contiguous(), weight[24:48].contiguous())
    turned = rotary_store(**parts, query_heads=3, head_norms=head_norms, epsilon=1e-5)
    for row in (0, 7, 19):
        one = slice(row, row + 1)
        assert torch.equal(silu_mul(x[one]), gates[one])
        assert torch.equal(add_rms_norm(x[one].clone(), x.flip(0)[one], weight, 1e-5), norms[one])
        alone = {name: value[one] for name, value in parts.items() if name != "pool"} | {"pool": parts["pool"].clone()}
        again = rotary_store(**alone, query_heads=3, head_norms=head_norms, epsilon=1e-5)
        assert torch.equal(again, turned[one])
        assert torch.equal(alone["pool"], parts["pool"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype: torch.dtype, device: str) -> None:
    none = torch.zeros(0, 8, dtype=dtype, device=device)
    assert add_rms_norm(none, None, torch.ones(8, dtype=dtype, device=device), 1e-5).shape == (0, 8)
    assert silu_mul(none).shape == (0, 4)
    parts = {name: value.to(device) for name, value in rotary_parts(0, (4, 2), 8, dtype).items()}
    before = parts["pool"].clone()
    assert rotary_store(**parts, query_heads=4, head_norms=None, epsilon=0.0).shape == (0, 4, 8)
    assert torch.equal(parts["pool"], before)
