"""Filtered tokens of the device kernel: the reference's, which sorts."""

import math

import pytest
import torch
from torch import Tensor

from kernels import sample as reference
from kernels.sample import OFF, Filters
from kernels.triton.sample import sample
from tests.kernels.test_triton_sample import VOCAB, half_broken


def _rows(count: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of which many are equal, and keys."""
    generator = torch.Generator().manual_seed(count)
    logits = (torch.randn(count, vocab, generator=generator) * 8).round().div(4).to(dtype)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    positions = torch.randint(0, 32_768, (count,), generator=generator)
    temperatures = torch.rand(count, generator=generator) * 1.5 + 0.2
    return logits.to(device), seeds.to(device), positions.to(device), temperatures.to(device)


def _filters(count: int, vocab: int, device: str, *, min_p: bool, top_k: bool, top_p: bool) -> Filters:
    """Other numbers in each row, some of which filter nothing."""
    numbers = torch.arange(count)
    least = torch.tensor([OFF, math.log(0.03), math.log(0.3)])[numbers % 3]
    counts = torch.tensor([0, 1, 7, 40, vocab])[numbers % 5].clamp(max=vocab)
    shares = torch.tensor([1.0, 0.93, 0.6, 0.2, 0.01, 0.0], dtype=torch.float64)[numbers % 6]
    return Filters(
        (least if min_p else torch.full_like(least, OFF)).to(device),
        (counts if top_k else torch.zeros_like(counts)).to(device),
        (shares if top_p else torch.ones_like(shares)).to(device),
    )


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [(False, False, False), (True, False, False), (False, True, False), (False, False, True), (True, True, True)],
)
def test_tokens_are_the_reference_s(min_p: bool, top_k: bool, top_p: bool, dtype: torch.dtype, device: str) -> None:
    for count, vocab in ((1, 1), (30, 37), (30, VOCAB)):
        rows = _rows(count, vocab, dtype, device)
        rows[3][::7] = 0
        filters = _filters(count, vocab, device, min_p=min_p, top_k=top_k, top_p=top_p)
        chosen, expected = sample(*rows, filters), reference.sample(*rows, filters)
        assert torch.equal(chosen.tokens, expected.tokens)
        assert not chosen.bad_rows.any()


def test_filters_change_tokens(device: str) -> None:
    rows = _rows(30, VOCAB, torch.float32, device)
    off = sample(*rows, _filters(30, VOCAB, device, min_p=False, top_k=False, top_p=False)).tokens
    for only in ("min_p", "top_k", "top_p"):
        on = {name: name == only for name in ("min_p", "top_k", "top_p")}
        assert (sample(*rows, _filters(30, VOCAB, device, **on)).tokens != off).sum() >= 5


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [(0, 0.25, 1), (0, 0.26, 2), (2, 1.0, 2), (3, 0.34, 2), pytest.param(3, 0.33, 1, marks=pytest.mark.slow)],
)
def test_a_border_between_equals_falls_by_id(top_k: int, top_p: float, kept: int, device: str) -> None:
    count = 64  # positions, so that each kept token is drawn once at least
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    filters = Filters(
        torch.full((count,), OFF, device=device), zeros + top_k, torch.full_like(zeros, top_p, dtype=torch.float64)
    )
    positions = torch.arange(count, device=device)
    chosen = sample(torch.zeros(count, 4, device=device), zeros, positions, zeros + 1.0, filters)
    assert set(chosen.tokens.tolist()) == set(range(kept))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_without_a_finite_score_are_named(temperature: float, device: str) -> None:
    logits = half_broken(device)
    zeros = torch.zeros(5, dtype=torch.int64, device=device)
    filters = Filters(zeros - 3.0, zeros + 5, zeros + torch.tensor(0.9, dtype=torch.float64, device=device))
    chosen = sample(logits, zeros, zeros, zeros + temperature, filters)
    assert chosen.bad_rows.tolist() == [True, True, True, False, False]
    assert chosen.tokens[:4].tolist() == [0, 0, 0, VOCAB - 1]


def test_a_row_does_not_depend_on_its_company(device: str) -> None:
    rows = _rows(9, VOCAB, torch.float32, device)
    filters = _filters(9, VOCAB, device, min_p=True, top_k=True, top_p=True)
    together = sample(*rows, filters).tokens
    for number in range(9):
        part = torch.tensor([number], device=device)
        logits, seeds, positions, temperatures = (value[part] for value in rows)
        assert sample(logits, seeds, positions, temperatures, filters.of(part)).tokens == together[number]
