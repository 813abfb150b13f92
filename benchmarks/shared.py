"""Shared by several benchmarks: options, prompts, and figures."""

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

from service.errors import StartupError
from service.text.prompts import PromptLine, PromptSet, read_lines

PromptFile = Annotated[
    Path, typer.Option("--prompts", metavar="FILE", help="JSONL file with messages, turns or prompt in each line.")
]
LongestAnswer = Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")]
Prompt = tuple[int, ...]


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


def in_one_line(summary: Mapping[str, object]) -> str:
    """Return the figures of a summary as NAME VALUE, ..."""
    figures = ((name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in summary.items())
    return ", ".join(f"{name} {value}" for name, value in figures)


def percentile(
    values: Iterable[float], percent: float, *, method: Literal["inverted_cdf", "linear"] = "inverted_cdf"
) -> float:
    """Return the smallest value that `percent` of the values do not exceed; 0 without values."""
    found = list(values)
    return float(np.percentile(found, percent, method=method)) if found else 0.0
