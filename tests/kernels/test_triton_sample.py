# mypy: allow-untyped-decorators
"""Tokens drawn by the device kernel: the reference's, to the bit wherever logarithms are the reference's."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import sample as reference
from kernels.sample import gumbel_noise_of, hash_bits, row_keys
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


def half_broken(device: str) -> Tensor:
    """Logits of five rows, three of which have no token to choose, and one a single token, the last."""
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)).to(device)
    logits[0, 2000], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, : VOCAB - 1] = -torch.inf
    return logits


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_without_a_finite_score_are_named(temperature: float, device: str) -> None:
    logits = half_broken(device)
    zeros = torch.zeros(5, dtype=torch.int64, device=device)
    chosen = sample(logits, zeros, zeros, zeros + temperature)
    assert chosen.bad_rows.tolist() == [True, True, True, False, False]
    assert chosen.tokens[:4].tolist() == [0, 0, 0, VOCAB - 1]


def test_a_tiny_temperature_is_the_likeliest_token(device: str) -> None:
    logits, seeds, positions, _ = (value.to(device) for value in _rows(4, VOCAB, torch.float32))
    cold = sample(logits, seeds, positions, torch.full((4,), 1e-30, device=device))
    assert torch.equal(cold.tokens, logits.argmax(-1))


def test_a_row_does_not_depend_on_its_company(device: str) -> None:
    logits, seeds, positions, temperatures = (value.to(device) for value in _rows(9, VOCAB, torch.float32))
    together = sample(logits, seeds, positions, temperatures).tokens
    for row in range(9):
        part = slice(row, row + 1)
        assert sample(logits[part], seeds[part], positions[part], temperatures[part]).tokens == together[row]
