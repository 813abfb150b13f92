"""Rotary embeddings of the device kernel: the bits of the reference."""

import pytest
import torch
from torch import Tensor

from kernels import rotary as reference
from kernels.triton.rotary import rotary


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
def test_equals_the_reference(rows: int, dim: int, heads: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    drawn = [part.to(device) for part in _drawn(rows, heads, dim, dtype)]
    for found, expected in zip(rotary(*drawn), reference.rotary(*drawn), strict=True):
        assert torch.equal(found, expected)


def test_rows_of_the_results_stand_side_by_side(device: str) -> None:
    query, key = rotary(*(part.to(device) for part in _drawn(3, (4, 2), 8, torch.float32)))
    assert query.transpose(1, 2).is_contiguous()
    assert key.transpose(1, 2).is_contiguous()


def test_no_rows(device: str) -> None:
    query, key = rotary(*(part.to(device) for part in _drawn(0, (4, 2), 8, torch.float32)))
    assert (query.shape, key.shape) == ((1, 4, 0, 8), (1, 2, 0, 8))
