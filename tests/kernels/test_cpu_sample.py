"""Choices of compiled kernels: those of the reference, to the token."""

import math

import pytest
import torch

from kernels.cpu import sample as compiled_sample
from kernels.ops import REFERENCE, Ops
from kernels.sample import OFF, Filters, noise_of_tokens, row_keys, token_ids

DTYPES = [torch.bfloat16, torch.float32]
ROWS = 9


def _logits(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Of few different values, so that the highest stands in many places."""
    drawn = torch.randint(-20, 3, (ROWS, vocab), generator=torch.Generator().manual_seed(vocab)).to(dtype)
    for row, value in enumerate((math.nan, math.inf, -math.inf), start=2):
        drawn[row, vocab // 2] = value
    drawn[5] = -math.inf
    drawn[6] = drawn[6].clamp(max=-7)
    drawn[7] = -0.0
    drawn[7, vocab // 2] = 0.0
    return drawn


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 63, 64, 65, 129, 4999, 49_152])
def test_the_likeliest_is_the_reference_s(vocab: int, dtype: torch.dtype, threads: int, compiled: Ops) -> None:
    logits = _logits(vocab, dtype)
    expected = REFERENCE.choose_likeliest(logits)
    torch.set_num_threads(threads)
    for rows in (slice(None), slice(1), slice(2, 3), slice(0, 0), slice(3, 9)):
        found = compiled.choose_likeliest(logits[rows])
        assert torch.equal(found.tokens, expected.tokens[rows])
        assert torch.equal(found.bad_rows, expected.bad_rows[rows])
    torch.set_num_threads(1)


def test_a_nan_is_found_anywhere(compiled: Ops) -> None:
    for place in (0, 17, 130, 148):
        logits = torch.zeros(1, 149)
        logits[0, place] = math.nan
        assert compiled.choose_likeliest(logits).bad_rows.tolist() == [True]


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_samples_are_the_reference_s(warm: bool, filtered: bool, compiled: Ops) -> None:
    logits = torch.randn(6, 501, generator=torch.Generator().manual_seed(0)).bfloat16()
    seeds, positions = torch.arange(6), torch.arange(6) + 9
    temperatures = torch.tensor([0.0, 1.0, 0.0, 0.3, 2.0, 0.0]) * warm
    filters = Filters(torch.full((6,), OFF), torch.full((6,), 5), torch.full((6,), 0.9).double()) if filtered else None
    found = compiled.sample(logits, seeds, positions, temperatures, filters)
    expected = REFERENCE.sample(logits, seeds, positions, temperatures, filters)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.bad_rows, expected.bad_rows)


def test_a_row_is_drawn_alike_whether_or_not_a_batch_mate_filters(compiled: Ops) -> None:
    logits = torch.randn(300, 501, generator=torch.Generator().manual_seed(0)).bfloat16()
    seeds, positions, temperatures = torch.arange(300), torch.arange(300) + 9, torch.full((300,), 1.3)
    off = Filters(torch.full((300,), OFF), torch.zeros(300, dtype=torch.int64), torch.ones(300).double())
    plain = compiled.sample(logits, seeds, positions, temperatures)
    assert torch.equal(compiled.sample(logits, seeds, positions, temperatures, off).tokens, plain.tokens)
    for row in range(0, 300, 7):
        one = slice(row, row + 1)
        alone = compiled.sample(logits[one], seeds[one], positions[one], temperatures[one])
        assert alone.tokens == plain.tokens[row]


@pytest.mark.usefixtures("compiled")
def test_noise_is_the_reference_s_up_to_the_logarithm() -> None:
    keys = row_keys(torch.arange(50), torch.arange(50) * 3)
    noise = compiled_sample.noise_of_tokens(keys, token_ids(20_003, torch.device("cpu")))
    expected = noise_of_tokens(keys, token_ids(20_003, torch.device("cpu")))
    torch.testing.assert_close(noise, expected, atol=2e-6, rtol=1e-6)
