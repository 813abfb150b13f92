"""How unlikely counts and draws are, if they follow a law."""

import math

import torch
from torch import Tensor


def of_chi_square(statistic: float, freedom: int) -> float:
    """The chance of a larger value with so many degrees of freedom."""
    shape, bound = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(shape, bound))


def of_equal_counts(counts: Tensor) -> float:
    """Of these counts, if all cells are equally likely. # [cells]"""
    expected = counts.double().mean()
    return of_chi_square(float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1)


def of_uniform_draws(draws: Tensor) -> float:
    """An upper bound for draws in [0, 1], by Massart's inequality on the largest distance from the line. # [draws]"""
    steps = torch.arange(len(draws) + 1, dtype=torch.float64) / len(draws)
    ordered = draws.double().sort().values
    distance = float(torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max())
    return 2 * math.exp(-2 * len(draws) * distance**2)
