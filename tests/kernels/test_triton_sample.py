# mypy: allow-untyped-decorators
"""Tokens drawn by the device kernel: the reference's, to the bit wherever logarithms are the reference's."""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import sample as reference
from kernels.sample import OFF, Filters, gumbel_noise_of, hash_bits, row_keys
from kernels.triton.sample import gumbel, sample
from kernels.triton.sample import hash_bits as device_hash_bits

VOCAB = 3001


@triton.jit
def _write(seeds: tl.tensor, positions: tl.tensor, bits: tl.tensor, noise: tl.tensor, BLOCK: tl.constexpr) -> None:  # noqa: N803
    """One row's bits and noise."""
    row, token = tl.program_id(0), tl.arange(0, BLOCK)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    tl.store(bits + row * BLOCK + token, device_hash_bits(seed, position, token).to(tl.int32, bitcast=True))
    tl.store(noise + row * BLOCK + token, gumbel(seed, position, token))


def _drawn(seeds: Tensor, positions: Tensor, count: int, device: str) -> tuple[Tensor, Tensor]:
    bits = torch.empty(len(seeds), count, dtype=torch.int32, device=device)
    noise = torch.full((len(seeds), count), torch.nan, device=device)
    _write[(len(seeds),)](seeds.to(device), positions.to(device), bits, noise, BLOCK=count)
    return bits.cpu(), noise.cpu()


SEEDS = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
POSITIONS = torch.tensor([0, 1, 4095, 2**31, 7, 2**20])


def test_hash_bits_are_the_reference_s(device: str) -> None:
    bits, _ = _drawn(SEEDS, POSITIONS, 4096, device)
    assert torch.equal(bits, hash_bits(row_keys(SEEDS, POSITIONS), torch.arange(4096, dtype=torch.int32)))


def test_noise_is_the_reference_s_on_the_same_device(device: str) -> None:
    _, noise = _drawn(SEEDS, POSITIONS, 4096, device)
    assert torch.equal(
        noise, gumbel_noise_of(SEEDS.to(device), POSITIONS.to(device), torch.arange(4096, device=device)).cpu()
    )


def _rows(count: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    logits = (torch.randn(count, vocab, generator=generator) * 3).to(dtype)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    positions = torch.randint(0, 32_768, (count,), generator=generator)
    return logits, seeds, positions, torch.rand(count, generator=generator) * 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "vocab"), [(1, 1), (1, 1023), (3, 1024), (7, VOCAB), (64, 300), (1, 49_152)])
def test_tokens_are_the_reference_s(count: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    logits, seeds, positions, temperatures = (value.to(device) for value in _rows(count, vocab, dtype))
    temperatures[::3] = 0
    chosen = sample(logits, seeds, positions, temperatures)
    expected = reference.sample(logits, seeds, positions, temperatures)
    assert torch.equal(chosen.tokens, expected.tokens)
    assert not chosen.bad_rows.any()


def test_of_equal_scores_the_lowest_id_is_chosen(device: str) -> None:
    logits = torch.zeros(2, VOCAB, device=device)
    logits[1, [7, 2900, 1500]] = 2.0
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    assert sample(logits, zeros, zeros, zeros.float()).tokens.tolist() == [0, 7]


def test_a_tiny_temperature_is_the_likeliest_token(device: str) -> None:
    logits, seeds, positions, _ = (value.to(device) for value in _rows(4, VOCAB, torch.float32))
    cold = sample(logits, seeds, positions, torch.full((4,), 1e-30, device=device))
    assert torch.equal(cold.tokens, logits.argmax(-1))


def _rows_with_equals(count: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
def test_filtered_tokens_are_the_reference_s(
    min_p: bool, top_k: bool, top_p: bool, dtype: torch.dtype, device: str
) -> None:
    for count, vocab in ((1, 1), (30, 37), (30, VOCAB)):
        rows = _rows_with_equals(count, vocab, dtype, device)
        rows[3][::7] = 0
        filters = _filters(count, vocab, device, min_p=min_p, top_k=top_k, top_p=top_p)
        chosen, expected = sample(*rows, filters), reference.sample(*rows, filters)
        assert torch.equal(chosen.tokens, expected.tokens)
        assert not chosen.bad_rows.any()


def test_filters_change_tokens(device: str) -> None:
    rows = _rows_with_equals(30, VOCAB, torch.float32, device)
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


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_without_a_finite_score_are_named(temperature: float, filtered: bool, device: str) -> None:
    """Three of five rows have no token to choose, and one a single token, the last."""
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)).to(device)
    logits[0, 2000], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, : VOCAB - 1] = -torch.inf
    zeros = torch.zeros(5, dtype=torch.int64, device=device)
    filters = Filters(zeros - 3.0, zeros + 5, zeros + torch.tensor(0.9, dtype=torch.float64, device=device))
    chosen = sample(logits, zeros, zeros, zeros + temperature, filters if filtered else None)
    assert chosen.bad_rows.tolist() == [True, True, True, False, False]
    assert chosen.tokens[:4].tolist() == [0, 0, 0, VOCAB - 1]


@pytest.mark.parametrize("filtered", [False, True])
def test_a_row_does_not_depend_on_its_company(filtered: bool, device: str) -> None:
    rows = _rows_with_equals(9, VOCAB, torch.float32, device)
    filters = _filters(9, VOCAB, device, min_p=filtered, top_k=filtered, top_p=filtered)
    together = sample(*rows, filters if filtered else None).tokens
    for number in range(9):
        part = torch.tensor([number], device=device)
        logits, seeds, positions, temperatures = (value[part] for value in rows)
        alone = sample(logits, seeds, positions, temperatures, filters.of(part) if filtered else None)
        assert alone.tokens == together[number]
