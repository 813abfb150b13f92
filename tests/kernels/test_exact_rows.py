"""The multiple of rows at which products are exact: found where libraries need it, and true where it was found."""

import pytest
import torch
from torch import Tensor

from kernels.exact_rows import ROW_MULTIPLES, exact_row_multiple

torch.set_num_threads(1)

CPU = torch.device("cpu")
WIDTH = 128


@pytest.mark.parametrize("dim", [8, 48, 64, 96, 256])
def test_rows_keep_their_bits_at_the_multiple_found(dim: int) -> None:
    multiple = exact_row_multiple(WIDTH, dim, CPU)
    generator = torch.Generator().manual_seed(dim)
    weights, values = torch.rand(5, 600, WIDTH, generator=generator), torch.randn(5, WIDTH, dim, generator=generator)
    queries = torch.randn(5, 600, dim, generator=generator)
    for left, right in ((queries, values.transpose(1, 2)), (weights, values)):
        whole = torch.bmm(left, right)
        for rows in (*range(multiple, 100, multiple), 512):
            part = left[:2, 40 : 40 + rows].contiguous()
            assert torch.equal(torch.bmm(part, right[:2]), whole[:2, 40 : 40 + rows])


@pytest.mark.parametrize("needed", ROW_MULTIPLES)
def test_a_library_that_sums_few_rows_in_another_order_needs_more(needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    true_bmm = torch.bmm

    def bmm(left: Tensor, right: Tensor) -> Tensor:
        return true_bmm(left, right) * (1.0 if left.shape[1] >= needed else 1 + 1e-6)

    monkeypatch.setattr(torch, "bmm", bmm)
    assert exact_row_multiple(WIDTH, 64, CPU) == needed


def test_a_library_that_is_never_exact_gets_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    true_bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda left, right: true_bmm(left, right) * (1 + left.shape[1] * 1e-6))
    assert exact_row_multiple(WIDTH, 64, CPU) == ROW_MULTIPLES[-1]
