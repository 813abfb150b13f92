"""Ratios of what was measured in the same turns, with their intervals."""

from collections.abc import Sequence

import numpy as np

from service.bench.driver import Run, Span

Interval = tuple[float, float, float]
"""A figure, and the bounds of its 95 % interval."""

_RESAMPLES = 2000
_PERCENTS = (2.5, 97.5)


def rate_ratio(
    mine: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], *, seed: int = 0
) -> Interval:
    """Return the ratio of two rates, each given by turn as (amount, units), with its interval when turns are drawn
    anew in pairs."""
    turns = np.array([(*one, *other) for one, other in zip(mine, others, strict=True)], float)  # [turn, column]
    drawn = np.random.default_rng(seed).integers(len(turns), size=(_RESAMPLES, len(turns)))
    sums = np.concatenate([turns.sum(0)[None], turns[drawn].sum(1)])  # [1 + resample, column]
    ratios = sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3])
    low, high = np.percentile(ratios[1:], _PERCENTS)
    return float(ratios[0]), float(low), float(high)


def speed_ratio(mine: Sequence[Span | Run], others: Sequence[Span | Run]) -> Interval:
    """Return the ratio of tokens per second, with its interval over paired turns."""
    return rate_ratio(*([(_tokens(one), one.seconds) for one in turns] for turns in (mine, others)))


def _tokens(one: Span | Run) -> int:
    return one.tokens if isinstance(one, Span) else one.num_tokens


def shown(interval: Sequence[float]) -> str:
    """Return FIGURE [LOW, HIGH]."""
    return "{:.3f} [{:.3f}, {:.3f}]".format(*interval)
