"""Keys and values stored by the device kernel: where the reference stores them, and nowhere else."""

import pytest
import torch

from kernels import store_kv as reference
from kernels.triton.store_kv import store_kv


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 3, 64), (5, 1, 24), (40, 8, 128)])
def test_equals_the_reference(
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
    pool = torch.zeros(4, 1, 2, device=device)
    store_kv(pool, torch.zeros(2, 0, dtype=torch.int64, device=device), *[torch.ones(0, 1, 2, device=device)] * 2)
    assert not pool.any()
