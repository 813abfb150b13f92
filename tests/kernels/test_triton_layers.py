"""Ops of a decoder layer by the device kernels, against the references."""

import pytest
import torch
from torch import Tensor

from kernels import layers as reference
from kernels.triton.layers import rms_norm, rotary, silu_mul, store_kv

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6}  # two roundings, each of which may fall to the other side


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(576,), (1, 64), (3, 1, 100), (1, 7, 576), (2, 5, 3, 128), (1, 2, 4096)])
def test_norms_equal_the_reference_s(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
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


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(2,), (1, 1, 96), (1, 5, 2 * 1536), (3, 2 * 1025), (1, 2, 28_672)])
def test_gates_equal_the_reference_s(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    joined = (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 5).to(dtype).to(device)
    expected = reference.silu_mul(joined)
    torch.testing.assert_close(silu_mul(joined), expected, atol=1e-30, rtol=TOLERANCES[dtype])


def test_large_gates_are_open_or_shut(device: str) -> None:
    gate, up = torch.tensor([80.0, -80.0, 0.0], device=device), torch.tensor([3.0, 3.0, 3.0], device=device)
    opened, shut, nothing = silu_mul(torch.cat([gate, up])).tolist()
    assert (opened, nothing) == (240.0, 0.0)
    assert -1e-30 < shut <= 0.0


def _drawn(rows: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys as they come out of a joined product, and the angles of their positions."""
    generator = torch.Generator().manual_seed(rows)
    joined = torch.randn(1, rows, (heads[0] + 2 * heads[1]) * dim, generator=generator).to(dtype)
    query, key, _ = joined.split([heads[0] * dim, heads[1] * dim, heads[1] * dim], dim=-1)
    turned = [part.view(1, rows, part.shape[-1] // dim, dim).transpose(1, 2) for part in (query, key)]
    angles = (torch.rand(1, rows, dim // 2, generator=generator) * 1000).repeat(1, 1, 2)
    return turned[0], turned[1], angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3), (4, 1), (2, 2)])
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (5, 128), (33, 24)])
def test_rotary_embeddings_equal_the_reference_s(
    rows: int, dim: int, heads: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    drawn = [part.to(device) for part in _drawn(rows, heads, dim, dtype)]
    for found, expected in zip(rotary(*drawn), reference.rotary(*drawn), strict=True):
        assert torch.equal(found, expected)


def test_rows_of_the_results_stand_side_by_side(device: str) -> None:
    query, key = rotary(*(part.to(device) for part in _drawn(3, (4, 2), 8, torch.float32)))
    assert query.transpose(1, 2).is_contiguous()
    assert key.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 3, 64), (5, 1, 24), (40, 8, 128)])
def test_stores_equal_the_reference_s(
    rows: int, heads: int, dim: int, dtypes: tuple[torch.dtype, torch.dtype], device: str
) -> None:
    generator = torch.Generator().manual_seed(rows)
    pool = torch.randn(2 * 50, heads, dim, generator=generator).to(dtypes[1]).to(device)
    expected = pool.clone()
    slots = torch.randperm(50, generator=generator)[:rows].to(device)
    places = torch.stack([slots, slots + 50])
    joined = torch.randn(rows, 3 * heads * dim, generator=generator).to(dtypes[0]).to(device)
    keys, values = (part.view(rows, heads, dim) for part in joined[:, heads * dim :].chunk(2, dim=-1))
    store_kv(pool, places, keys, values)
    reference.store_kv(expected, places, keys, values)
    assert torch.equal(pool, expected)


def test_no_rows(device: str) -> None:
    assert rms_norm(torch.zeros(1, 0, 8, device=device), torch.ones(8, device=device), 1e-5).shape == (1, 0, 8)
    assert silu_mul(torch.zeros(1, 0, 8, device=device)).shape == (1, 0, 4)
    query, key = rotary(*(part.to(device) for part in _drawn(0, (4, 2), 8, torch.float32)))
    assert (query.shape, key.shape) == ((1, 4, 0, 8), (1, 2, 0, 8))
    pool = torch.zeros(4, 1, 2, device=device)
    store_kv(pool, torch.zeros(2, 0, dtype=torch.int64, device=device), *[torch.ones(0, 1, 2, device=device)] * 2)
    assert not pool.any()
