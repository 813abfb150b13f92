"""The noise is the hash it claims to be, depends on its key alone, and is Gumbel."""

import math

import pytest
import torch

from kernels.sample import gumbel_noise_of, hash_bits, row_keys
from tests import p_values

torch.manual_seed(0)

MASK32, MASK64 = 2**32 - 1, 2**64 - 1
KNOWN = [
    [1.21887, 1.94718, 0.75922, 0.1224, 0.80342],
    [0.3724, -0.0539, -0.58241, -0.59677, -0.47929],
    [0.23172, 1.41584, 0.95791, 1.01314, 1.05913],
]


def _mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def _mix32(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D & MASK32
    x = (x ^ (x >> 15)) * 0x846CA68B & MASK32
    return x ^ (x >> 16)


def _hash(seed: int, position: int, token: int) -> int:
    """The hash in unbounded integers."""
    golden = 0x9E3779B97F4A7C15
    key = _mix64((_mix64((seed + golden) & MASK64) + (position + 1) * golden) & MASK64)
    return _mix32(_mix32(token ^ (key & MASK32)) ^ (key >> 32))


def _bits(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    return hash_bits(row_keys(seeds, positions), torch.arange(vocab, dtype=torch.int32)).to(torch.int64) & MASK32


def test_splitmix_and_lowbias_known_answers() -> None:
    # first outputs of SplitMix64 from seed 0 are published with the generator
    assert _mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert _mix64(2 * 0x9E3779B97F4A7C15 & MASK64) == 0x6E789E6AA1B965F4
    assert _mix32(0) == 0


def test_hash_equals_integer_arithmetic() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    positions = [0, 1, 4095, 2**31, 7, 2**20]
    bits = _bits(torch.tensor(seeds), torch.tensor(positions), 70)
    expected = [[_hash(s & MASK64, p, v) for v in range(70)] for s, p in zip(seeds, positions, strict=True)]
    assert bits.tolist() == expected


def test_noise_known_answers() -> None:
    noise = gumbel_noise_of(torch.tensor([0, 42, -7]), torch.tensor([0, 17, 4000]), torch.arange(5))
    torch.testing.assert_close(noise, torch.tensor(KNOWN), atol=1e-5, rtol=0)


def test_noise_is_the_formula_in_double_precision() -> None:
    seeds, positions = torch.arange(40) * 7919, torch.arange(40)
    u = (_bits(seeds, positions, 5003).double() + 0.5) * 2.0**-32
    expected = -torch.log(-torch.log1p(-u.clamp(max=1 - 2.0**-24)))
    noise = gumbel_noise_of(seeds, positions, torch.arange(5003))
    # near u = 1 a float32 step of u moves g by up to 2^-24 / (1 - u) / E
    torch.testing.assert_close(noise[u < 0.999].double(), expected[u < 0.999], atol=2e-4, rtol=1e-6)
    torch.testing.assert_close(noise[u < 0.01].double(), expected[u < 0.01], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("vocab", [1, 17, 1003, 49152])
def test_rows_do_not_depend_on_company_order_or_threads(vocab: int) -> None:
    seeds, positions = torch.randint(-(2**62), 2**62, (19,)), torch.randint(0, 8192, (19,))
    together = gumbel_noise_of(seeds, positions, torch.arange(vocab))
    order = torch.randperm(19)
    assert torch.equal(gumbel_noise_of(seeds[order], positions[order], torch.arange(vocab)), together[order])
    for row in range(19):
        assert torch.equal(
            gumbel_noise_of(seeds[row : row + 1], positions[row : row + 1], torch.arange(vocab))[0], together[row]
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    assert torch.equal(gumbel_noise_of(seeds, positions, torch.arange(vocab)), together)
    torch.set_num_threads(threads)


def test_a_longer_vocabulary_keeps_the_noise_of_the_first_tokens() -> None:
    seeds, positions = torch.arange(3), torch.arange(3)
    assert torch.equal(
        gumbel_noise_of(seeds, positions, torch.arange(5000))[:, :777],
        gumbel_noise_of(seeds, positions, torch.arange(777)),
    )


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert gumbel_noise_of(none, none, torch.arange(11)).shape == (0, 11)


def test_adjacent_keys_share_nothing() -> None:
    grid = torch.cartesian_prod(torch.arange(50), torch.arange(50))
    bits = _bits(grid[:, 0], grid[:, 1], 40)
    # 100,000 draws of 32 bits are expected to meet in 1.2 pairs
    assert bits.unique().numel() > bits.numel() - 12


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_is_uniform(shift: int) -> None:
    bits = _bits(torch.arange(300), torch.arange(300) % 7, 4000)
    counts = torch.bincount(((bits >> shift) & 255).flatten(), minlength=256)
    assert p_values.of_equal_counts(counts) > 1e-6


@pytest.mark.parametrize("axis", ["seeds", "positions", "tokens"])
def test_neighbours_are_independent(axis: str) -> None:
    """Joint counts of the high nibbles of neighbours, and their linear correlation."""
    count = torch.arange(1001)
    fixed = torch.full_like(count, 5)
    seeds, positions = {"seeds": (count, fixed), "positions": (fixed, count), "tokens": (count, count)}[axis]
    bits = _bits(seeds, positions, 1001)
    left, right = (bits[:, :-1], bits[:, 1:]) if axis == "tokens" else (bits[:-1], bits[1:])
    joint = torch.bincount(((left >> 28) * 16 + (right >> 28)).flatten(), minlength=256)
    assert p_values.of_equal_counts(joint) > 1e-6
    correlation = torch.corrcoef(torch.stack((left.flatten(), right.flatten())).double())[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(left.numel())


def test_moments_and_tails() -> None:
    noise = gumbel_noise_of(torch.arange(2000), torch.arange(2000) % 31, torch.arange(1000)).double()
    variance = math.pi**2 / 6
    standard_error = math.sqrt(variance / noise.numel())
    assert abs(noise.mean().item() - 0.5772156649) < 5 * standard_error
    assert abs(noise.var().item() - variance) < 5 * math.sqrt(4.4 / noise.numel()) * variance
    assert p_values.of_uniform_draws((-(-noise[:, 0]).exp()).exp()) > 1e-6
    # P(g > 10) = 4.5e-5: 91 of two million
    assert 45 < int((noise > 10).sum()) < 145
    assert noise.min().item() > -2.82
    assert noise.max().item() < 22.88
