"""What several benchmarks share: options, prompts, and ratios with their intervals."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from service.bench.driver import Run, Span
from service.errors import StartupError
from service.prompts import PromptLine, PromptSet, read_lines

PromptFile = Annotated[
    Path, typer.Option("--prompts", metavar="FILE", help="JSONL file with messages, turns or prompt in each line.")
]
LongestAnswer = Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")]
Prompt = tuple[int, ...]
Interval = tuple[float, float, float]
"""A figure, and the bounds of its 95 % interval."""

_RESAMPLES = 2000
_PERCENTS = (2.5, 97.5)


def read_chats(file: Path, *, limit: int | None = None) -> list[list[dict[str, str]]]:
    """Return the first `limit` prompts of a file as messages. Raises StartupError naming file and line."""
    lines = [line for _, line in islice(read_lines(file, PromptLine, "prompt file"), limit)]
    if not lines:
        raise StartupError(f"prompt file {file} holds no prompt")
    return [line.chat or [{"role": "user", "content": line.prompt}] for line in lines]


def mixed(sets: Sequence[PromptSet], count: int, rng: random.Random) -> tuple[Prompt, ...]:
    """Return `count` shuffled prompts, equally many of each set while it lasts. Raises StartupError for too few."""
    shuffled = [rng.sample(chosen.prompts, len(chosen.prompts)) for chosen in sets]
    dealt = [prompt for prompt in chain.from_iterable(zip_longest(*shuffled)) if prompt is not None][:count]
    if len(dealt) < count:
        names = " + ".join(chosen.name for chosen in sets)
        raise StartupError(f"{names}: {count} prompts are needed and there are {len(dealt)}; lower --queries")
    return tuple(rng.sample(dealt, count))


def paired_bootstrap(figure: Callable[[np.ndarray], np.ndarray], columns: np.ndarray, *, seed: int = 0) -> Interval:
    """Return `figure` of the columns' sums over all turns, with the interval when turns are drawn anew.

    columns [column, turn]; figure: [column, ...] -> [...]
    """
    turns = columns.shape[1]
    drawn = np.random.default_rng(seed).integers(turns, size=(_RESAMPLES, turns))
    low, high = np.percentile(figure(columns[:, drawn].sum(-1)), _PERCENTS)
    return float(figure(columns.sum(-1))), float(low), float(high)


def rate_ratio(
    mine: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], *, seed: int = 0
) -> Interval:
    """Return the ratio of two rates, each given by turn as (amount, units), with its interval over paired turns."""
    columns = np.array([(*one, *other) for one, other in zip(mine, others, strict=True)], float).T
    return paired_bootstrap(lambda sums: sums[0] / sums[1] / (sums[2] / sums[3]), columns, seed=seed)


def speed_ratio(mine: Sequence[Span | Run], others: Sequence[Span | Run]) -> Interval:
    """Return the ratio of tokens per second, with its interval over paired turns."""
    return rate_ratio(*([(_tokens(one), one.seconds) for one in turns] for turns in (mine, others)))


def _tokens(one: Span | Run) -> int:
    return one.tokens if isinstance(one, Span) else one.num_tokens


def shown(interval: Sequence[float]) -> str:
    """Return FIGURE [LOW, HIGH]."""
    return "{:.3f} [{:.3f}, {:.3f}]".format(*interval)


def in_one_line(summary: Mapping[str, object]) -> str:
    """Return the figures of a summary as NAME VALUE, ..."""
    figures = ((name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in summary.items())
    return ", ".join(f"{name} {value}" for name, value in figures)
