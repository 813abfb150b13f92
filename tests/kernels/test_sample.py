# mypy: allow-untyped-decorators
"""Sampling: filters against sorting in plain Python, kernels against the reference, and rows alone and in company."""

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import steps as compiled_sample
from kernels.cpu.library import use_threads
from kernels.ops import REFERENCE, Ops
from kernels.sample import (
    OFF,
    Filters,
    gumbel_noise_of,
    hash_bits,
    keep_top_k,
    likeliest,
    narrow_to_nucleus,
    noise_of_tokens,
    row_keys,
    sample,
    token_ids,
)
from kernels.triton.sample import gumbel
from kernels.triton.sample import hash_bits as device_hash_bits

VOCAB = 3001
Where = tuple[Ops, str]
# quarters of a nat: many equal scores, and probabilities that float32 separates
quarters = st.lists(st.integers(-24, 24).map(lambda i: i / 4), min_size=1, max_size=30)


def test_a_token_is_that_of_the_highest_score_with_noise() -> None:
    logits = (torch.randn(4, 501, generator=torch.Generator().manual_seed(0)) * 2).bfloat16()
    seeds, positions = torch.tensor([1, 1, 2, 3]), torch.tensor([5, 6, 5, 7])
    temperatures = torch.tensor([0.7, 1.0, 0.0, 1.3])
    scores = logits.float() / temperatures.where(temperatures > 0, 1.0)[:, None]
    scores += gumbel_noise_of(seeds, positions, torch.arange(501)) * (temperatures > 0)[:, None]
    assert torch.equal(sample(logits, seeds, positions, temperatures).tokens, scores.argmax(1))


def _ranking(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def _kept(scores: torch.Tensor) -> list[int]:
    return scores.isfinite().nonzero().squeeze(1).tolist()


@given(quarters, st.integers(1, 35))
def test_top_k_keeps_the_first_k_of_the_ranking(scores: list[float], k: int) -> None:
    k = min(k, len(scores))
    row = torch.tensor([scores, scores])
    keep_top_k(row, torch.tensor([k, 1]))
    assert _kept(row[0]) == sorted(_ranking(scores)[:k])
    assert _kept(row[1]) == _ranking(scores)[:1]


@given(quarters, st.integers(1, 35))
def test_likeliest_are_ranked(scores: list[float], k: int) -> None:
    k = min(k, len(scores))
    assert likeliest(torch.tensor([scores]), k)[0].tolist() == _ranking(scores)[:k]


@given(quarters, st.floats(0, 1))
def test_the_best_is_the_best_of_the_sorted_nucleus(scores: list[float], top_p: float) -> None:
    row = torch.tensor([scores])
    row -= row.amax()
    noise = torch.rand(1, len(scores), generator=torch.Generator().manual_seed(len(scores))) * 8
    weights = row[0].double().exp()
    nucleus: list[int] = []
    before, total = 0.0, weights.sum().item()
    for token in _ranking(row[0].tolist()):
        if nucleus and top_p < 1:
            assume(abs(before - top_p * total) > 1e-5 * total)
        if before < top_p * total or not nucleus or top_p >= 1:
            nucleus.append(token)
        before += weights[token].item()
    best = max(nucleus, key=lambda token: (row[0, token] + noise[0, token]).item())
    narrow_to_nucleus(row, noise, torch.tensor([top_p], dtype=torch.float64))
    assert (row + noise).argmax(-1).item() == best
    assert set(nucleus) <= set(_kept(row[0]))


def test_rows_of_a_large_vocabulary_do_not_depend_on_company() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(9, 30011, generator=generator) * 2
    scores -= scores.amax(-1, keepdim=True)
    noise = torch.rand(9, 30011, generator=generator) * 9
    top_p = torch.tensor([0.1, 0.5, 1.0, 0.9, 0.99, 0.0, 0.7, 0.3, 0.999], dtype=torch.float64)
    together = scores.clone()
    narrow_to_nucleus(together, noise, top_p)
    for i in range(9):
        alone = scores[i : i + 1].clone()
        narrow_to_nucleus(alone, noise[i : i + 1], top_p[i : i + 1])
        assert torch.equal(alone[0], together[i])
    assert torch.equal(together[2], scores[2])
    assert (together + noise)[5].argmax() == scores[5].argmax()


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
def test_tokens_are_the_reference_s(count: int, vocab: int, dtype: torch.dtype, everywhere: Where) -> None:
    kernels, device = everywhere
    logits, seeds, positions, temperatures = (value.to(device) for value in _rows(count, vocab, dtype))
    temperatures[::3] = 0
    for warm in (True, False):
        chosen, expected = (one.sample(logits, seeds, positions, temperatures * warm) for one in (kernels, REFERENCE))
        assert torch.equal(chosen.tokens, expected.tokens)
        assert not chosen.bad_rows.any()


def test_of_equal_scores_the_lowest_id_is_chosen(anywhere: Where) -> None:
    kernels, device = anywhere
    logits = torch.zeros(2, VOCAB, device=device)
    logits[1, [7, 2900, 1500]] = 2.0
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    assert kernels.sample(logits, zeros, zeros, zeros.float()).tokens.tolist() == [0, 7]


def test_a_tiny_temperature_is_the_likeliest_token(everywhere: Where) -> None:
    kernels, device = everywhere
    logits, seeds, positions, _ = (value.to(device) for value in _rows(4, VOCAB, torch.float32))
    cold = kernels.sample(logits, seeds, positions, torch.full((4,), 1e-30, device=device))
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
    min_p: bool, top_k: bool, top_p: bool, dtype: torch.dtype, everywhere: Where
) -> None:
    kernels, device = everywhere
    for count, vocab in ((1, 1), (30, 37), (30, VOCAB)):
        rows = _rows_with_equals(count, vocab, dtype, device)
        rows[3][::7] = 0
        filters = _filters(count, vocab, device, min_p=min_p, top_k=top_k, top_p=top_p)
        chosen, expected = kernels.sample(*rows, filters), REFERENCE.sample(*rows, filters)
        assert torch.equal(chosen.tokens, expected.tokens)
        assert not chosen.bad_rows.any()


def test_filters_change_tokens(anywhere: Where) -> None:
    kernels, device = anywhere
    rows = _rows_with_equals(30, VOCAB, torch.float32, device)
    off = kernels.sample(*rows, _filters(30, VOCAB, device, min_p=False, top_k=False, top_p=False)).tokens
    for only in ("min_p", "top_k", "top_p"):
        on = {name: name == only for name in ("min_p", "top_k", "top_p")}
        assert (kernels.sample(*rows, _filters(30, VOCAB, device, **on)).tokens != off).sum() >= 5


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [(0, 0.25, 1), (0, 0.26, 2), (0, 0.75, 3), (0, 0.76, 4), (2, 1.0, 2), (3, 0.34, 2), (3, 0.33, 1)],
)
def test_a_border_between_equals_falls_by_id(top_k: int, top_p: float, kept: int, anywhere: Where) -> None:
    kernels, device = anywhere
    count = 64  # positions, so that each kept token is drawn once at least
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    filters = Filters(
        torch.full((count,), OFF, device=device), zeros + top_k, torch.full_like(zeros, top_p, dtype=torch.float64)
    )
    positions = torch.arange(count, device=device)
    chosen = kernels.sample(torch.zeros(count, 4, device=device), zeros, positions, zeros + 1.0, filters)
    assert set(chosen.tokens.tolist()) == set(range(kept))


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_without_a_finite_score_are_named(temperature: float, filtered: bool, anywhere: Where) -> None:
    """Three of five rows have no token to choose, and one a single token, the last."""
    kernels, device = anywhere
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)).to(device)
    logits[0, 2000], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, : VOCAB - 1] = -torch.inf
    zeros = torch.zeros(5, dtype=torch.int64, device=device)
    filters = Filters(zeros - 3.0, zeros + 5, zeros + torch.tensor(0.9, dtype=torch.float64, device=device))
    chosen = kernels.sample(logits, zeros, zeros, zeros + temperature, filters if filtered else None)
    assert chosen.bad_rows.tolist() == [True, True, True, False, False]
    assert chosen.tokens[:4].tolist() == [0, 0, 0, VOCAB - 1]


@pytest.mark.parametrize("filtered", [False, True])
def test_a_row_does_not_depend_on_its_company(filtered: bool, anywhere: Where) -> None:
    kernels, device = anywhere
    rows = _rows_with_equals(9, VOCAB, torch.float32, device)
    filters = _filters(9, VOCAB, device, min_p=filtered, top_k=filtered, top_p=filtered)
    together = kernels.sample(*rows, filters if filtered else None).tokens
    for number in range(9):
        part = torch.tensor([number], device=device)
        logits, seeds, positions, temperatures = (value[part] for value in rows)
        alone = kernels.sample(logits, seeds, positions, temperatures, filters.of(part) if filtered else None)
        assert alone.tokens == together[number]


def test_logits_are_left_as_they_are(anywhere: Where) -> None:
    kernels, device = anywhere
    rows = _rows_with_equals(9, 501, torch.float32, device)
    for filters in (None, _filters(9, 501, device, min_p=True, top_k=True, top_p=True)):
        before = rows[0].clone()
        kernels.sample(*rows, filters)
        assert torch.equal(rows[0], before)


def _rows_of_few_values(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Of few different values, so that the highest stands in many places."""
    drawn = torch.randint(-20, 3, (9, vocab), generator=torch.Generator().manual_seed(vocab)).to(dtype)
    for row, value in enumerate((math.nan, math.inf, -math.inf), start=2):
        drawn[row, vocab // 2] = value
    drawn[5] = -math.inf
    drawn[6] = drawn[6].clamp(max=-7)
    drawn[7] = -0.0
    drawn[7, vocab // 2] = 0.0
    return drawn


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 63, 64, 65, 129, 4999, 49_152])
def test_the_likeliest_is_the_reference_s(vocab: int, dtype: torch.dtype, threads: int, compiled: Ops) -> None:
    logits = _rows_of_few_values(vocab, dtype)
    expected = REFERENCE.choose_likeliest(logits)
    use_threads(threads)
    for rows in (slice(None), slice(1), slice(2, 3), slice(0, 0), slice(3, 9)):
        found = compiled.choose_likeliest(logits[rows])
        assert torch.equal(found.tokens, expected.tokens[rows])
        assert torch.equal(found.bad_rows, expected.bad_rows[rows])
    use_threads(1)


def test_a_nan_is_found_anywhere(compiled: Ops) -> None:
    for place in (0, 17, 130, 148):
        logits = torch.zeros(1, 149)
        logits[0, place] = math.nan
        assert compiled.choose_likeliest(logits).bad_rows.tolist() == [True]


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
@pytest.mark.parametrize("spread", [1.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filtering_few_contenders_is_filtering_the_vocabulary(spread: float, dtype: torch.dtype) -> None:
    """With equal scores, greedy rows, and rows of which some token is not finite or forbidden."""
    generator, found = torch.Generator().manual_seed(1), 0
    for case in range(40):
        rows, vocab = 1 + case % 5, (640, 8192)[case % 2]
        logits = (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)
        if case % 4 == 0:
            logits = logits.round()
        logits[0, case] = {7: math.nan, 8: math.inf, 9: -math.inf}.get(case, 0.0)
        temperatures = 0.1 + 1.5 * torch.rand(rows, generator=generator)
        temperatures[-1] *= case % 3 > 0
        top_k, top_p = torch.randint(1, 40, (rows,), generator=generator), torch.rand(rows, generator=generator)
        filters = Filters(torch.full((rows,), (OFF, -2.0)[case % 2]), top_k, top_p.double())
        drawn = logits, torch.arange(rows) + case, torch.arange(rows) * 3, temperatures, filters
        expected = sample(*drawn, noise=compiled_sample.noise_of_tokens)
        for mine, theirs in zip(compiled_sample.sample(*drawn), expected, strict=True):
            assert torch.equal(mine, theirs)
        found += compiled_sample._contenders(logits, temperatures, filters) is not None
    assert found > 20


@pytest.mark.usefixtures("compiled")
def test_noise_is_the_reference_s_up_to_the_logarithm() -> None:
    keys = row_keys(torch.arange(50), torch.arange(50) * 3)
    noise = compiled_sample.noise_of_tokens(keys, token_ids(20_003, torch.device("cpu")))
    expected = noise_of_tokens(keys, token_ids(20_003, torch.device("cpu")))
    torch.testing.assert_close(noise, expected, atol=2e-6, rtol=1e-6)
