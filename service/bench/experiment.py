"""Common parts of experiments that compare engines: loading, prompts, taking turns, figures and reports.

Every experiment reports whether all contestants generated the same tokens: a speed-up with other text proves nothing.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table

from drafters.registry import NoDrafter
from service.assembly import Assembly, assemble
from service.bench.driver import Run, Span
from service.conditions import Conditions, conditions_of, refuse_unwritable, write_report
from service.config import ServiceConfig
from service.engine.budget import FixedBudget
from service.engine.engine import Engine, EngineLimits
from service.engine.requests import GenerationRequest, SamplingParams, Scope
from service.logging import bar
from service.text.prompts import PromptSet, read_prompt_set, refuse_too_long

PLAIN = "plain"
SPECULATIVE = "speculative"
_WIDTH = 320  # columns of the console if the output is not a terminal

Contestant = Callable[[Sequence[GenerationRequest]], Run]
"""Answers a batch of requests: `partial(generate, engine)`, or another engine on the same weights."""

T = TypeVar("T")
Row = dict[str, Any]
"""One line of a report, as JSON."""

Interval = tuple[float, float, float]
"""A figure, and the lower and upper bounds of its 95 % confidence interval."""

_STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": np.mean,
    "median": np.median,
    "p99": partial(np.percentile, q=99),
}
_RESAMPLES = 2000
_PERCENTS = (2.5, 97.5)

Column = tuple[str, Callable[[Row], str]]
"""The title of a table's column, and its cell for a row."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Sampling of the answers, and the number of prompts that are answered at a time."""

    temperature: float
    max_tokens: int
    concurrency: int
    seed: int


def prepare(config: ServiceConfig, out: Path | None) -> Assembly:
    """Load model and drafter as for serving. Raises StartupError; if `out` cannot be written, before loading."""
    refuse_unwritable(out)
    return assemble(config)


def conclude(
    assembly: Assembly,
    out: Path | None,
    rows: Sequence[object],
    summary: Mapping[str, object],
    *shown: RenderableType,
) -> bool:
    """Print and write a report with the assembly's conditions; returns whether no token differed."""
    return report(conditions_of(assembly), out, rows, summary, *shown)


def report(
    conditions: Conditions,
    out: Path | None,
    rows: Sequence[object],
    summary: Mapping[str, object],
    *shown: RenderableType,
) -> bool:
    """Print `shown`, write the report to `out` unless it is None, and return whether no token differed."""
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(*shown, sep="\n")
    write_report(out, conditions, rows, summary)
    return summary.get("mismatched_tokens", 0) == 0


def plain_engine(assembly: Assembly, limits: EngineLimits | None = None) -> Engine:
    """Build an engine that decodes without drafts."""
    return assembly.engine(drafter=NoDrafter(), policy=FixedBudget(0), limits=limits)


def read_sets(assembly: Assembly, files: Sequence[Path], limit: int | None, max_tokens: int) -> list[PromptSet]:
    """Read the prompts of all files. Raises StartupError if a prompt leaves no room for its answer."""
    sets = [read_prompt_set(file, assembly.tokenizer, limit=limit) for file in files]
    for file, prompts in zip(files, sets, strict=True):
        refuse_too_long(prompts.prompts, max_tokens, assembly.limits.max_model_len, f"prompt file {file}")
    return sets


def requests_from(prompts: Sequence[Sequence[int]], first: int, measure: Measure) -> list[GenerationRequest]:
    """Build the requests of one turn: for the prompts from `first` on, as many as are in flight together."""
    chosen = enumerate(prompts[first : first + measure.concurrency], first)
    return [request_of(number, prompt, measure) for number, prompt in chosen]


def request_of(
    number: int, prompt: Sequence[int], measure: Measure, *, client: str = "", ignore_eos: bool = True
) -> GenerationRequest:
    """Build a request with a seed of its own. Its answer has `max_tokens` tokens, or fewer if `ignore_eos` is false and
    the model ends it."""
    sampling = SamplingParams(
        seed=measure.seed + number,
        max_tokens=measure.max_tokens,
        temperature=measure.temperature,
        ignore_eos=ignore_eos,
    )
    return GenerationRequest(request_id=str(number), prompt=prompt, sampling=sampling, scope=Scope(address=client))


def rotated(contestants: Sequence[T], turn: int) -> list[T]:
    """Return the contestants in the order of a turn: each of them is first equally often, and none always follows the
    same other one."""
    shift = turn % len(contestants)
    order = [*contestants[shift:], *contestants[:shift]]
    return order[:1] + order[:0:-1] if turn // len(contestants) % 2 else order


def take_turns(
    prompts: Sequence[Sequence[int]],
    contestants: Mapping[str, Contestant],
    measure: Measure,
    advance: Callable[[int], None] = lambda prompts: None,
) -> dict[str, list[Run]]:
    """Let the contestants answer the prompts in turn; returns the runs by contestant."""
    firsts = range(0, len(prompts), measure.concurrency)
    return in_turn((requests_from(prompts, first, measure) for first in firsts), contestants, advance)


def in_turn(
    batches: Iterable[Sequence[T]],
    contestants: Mapping[str, Callable[[Sequence[T]], Run]],
    advance: Callable[[int], None] = lambda requests: None,
) -> dict[str, list[Run]]:
    """Let the contestants answer each batch of requests in turn; returns the runs by contestant."""
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for turn, batch in enumerate(batches):
        for name in rotated(list(contestants), turn):
            runs[name].append(contestants[name](batch))
        advance(len(batch))
    return runs


def warm_up(contestants: Mapping[str, Contestant], prompt: Sequence[int], measure: Measure) -> None:
    """Let the contestants answer once without measuring, because first calls allocate memory and choose code paths."""
    take_turns([prompt] * measure.concurrency, contestants, measure)


@contextmanager
def counted(total: int, title: str = "") -> Iterator[Callable[..., None]]:
    """Show a progress bar inside the block; yields `advance(done, note)`, which moves it by `done`."""
    with bar(title, total) as show:
        finished, latest = 0, ""

        def advance(done: int, note: str | None = None) -> None:
            nonlocal finished, latest
            finished, latest = finished + done, latest if note is None else note
            show(finished, latest)

        yield advance


def table_of(
    columns: Sequence[Column],
    rows: Sequence[Row],
    *,
    caption: str | None = None,
    section: Callable[[Row], object] = lambda row: None,
) -> Table:
    """Build a table with one line per row, and a rule wherever the value of `section` changes."""
    table = Table(*(title for title, _ in columns), caption=caption)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        ends = following is None or section(row) != section(following)
        table.add_row(*(cell(row) for _, cell in columns), end_section=ends)
    return table


def tokens_per_second(runs: Sequence[Run]) -> float:
    """Compute generated tokens per second, including the time of reading prompts."""
    return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)


def decode_tokens_per_second(runs: Iterable[Run]) -> float:
    """Compute tokens per second of the steps that read no prompt; 0 if there are none."""
    steps = [step for run in runs for step in run.steps if not step.stats.prompt_tokens]
    seconds = sum(step.seconds for step in steps)
    return sum(step.stats.emitted_tokens for step in steps) / seconds if seconds else 0.0


def tau(runs: Iterable[Run]) -> float:
    """Compute the mean number of tokens emitted per verify of a sequence; 1 without speculation."""
    accepted = [count for run in runs for answer in run.answers for count in answer.accepted_per_step]
    return 1 + sum(accepted) / max(1, len(accepted))


def figures_of(runs: Sequence[Run]) -> Row:
    """Compute the figures of one contestant's turns, named as by `vllm bench serve`. Figures of gaps are left out if
    all answers arrived in one piece."""
    answers = [answer for run in runs for answer in run.answers]
    seconds, tokens = sum(run.seconds for run in runs), sum(run.num_tokens for run in runs)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    in_parts = [answer for answer in answers if answer.gaps_seconds]
    times = {
        "ttft": [answer.first_token_seconds for answer in answers],
        "tpot": [sum(answer.gaps_seconds) / (len(answer.token_ids) - 1) for answer in in_parts],
        "itl": [gap for answer in in_parts for gap in answer.gaps_seconds],
        "e2el": [answer.seconds for answer in answers],
    }
    named = ((f"{name}_{what}_ms", of, some) for what, some in times.items() for name, of in _STATISTICS.items())
    return {
        "turns": len(runs),
        "duration": seconds,
        "completed": len(answers),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": tokens,
        "request_throughput": len(answers) / seconds,
        "output_throughput": tokens / seconds,
        "total_token_throughput": (prompt_tokens + tokens) / seconds,
        **{name: 1000 * float(of(some)) for name, of, some in named if some},
        "tau": tau(runs) if any(answer.accepted_per_step for answer in answers) else None,
    }


def count_mismatches(expected: Sequence[int], got: Sequence[int]) -> int:
    """Count the positions at which two answers differ, including those that the shorter answer lacks."""
    common = sum(a == b for a, b in zip(expected, got, strict=False))
    return max(len(expected), len(got)) - common


def mismatches(expected: Sequence[Run], got: Sequence[Run]) -> int:
    """Count the positions at which the answers of two contestants differ."""
    return sum(
        count_mismatches(one.token_ids, other.token_ids)
        for before, after in zip(expected, got, strict=True)
        for one, other in zip(before.answers, after.answers, strict=True)
    )


def rate_ratio(
    mine: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], *, seed: int = 0
) -> Interval:
    """Compute the ratio of two rates, each given as (numerator, denominator) per turn, with its interval from a
    bootstrap over paired turns."""
    turns = np.array([(*one, *other) for one, other in zip(mine, others, strict=True)], float)  # [turn, column]
    drawn = np.random.default_rng(seed).integers(len(turns), size=(_RESAMPLES, len(turns)))
    sums = np.concatenate([turns.sum(0)[None], turns[drawn].sum(1)])  # [1 + resample, column]
    ratios = sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3])
    low, high = np.percentile(ratios[1:], _PERCENTS)
    return float(ratios[0]), float(low), float(high)


def speed_ratio(mine: Sequence[Span | Run], others: Sequence[Span | Run]) -> Interval:
    """Compute the ratio of tokens per second, with its interval from a bootstrap over paired turns."""
    return rate_ratio(*([(_tokens(one), one.seconds) for one in turns] for turns in (mine, others)))


def _tokens(one: Span | Run) -> int:
    return one.tokens if isinstance(one, Span) else one.num_tokens


def shown(interval: Sequence[float]) -> str:
    """Format an interval as FIGURE [LOW, HIGH]."""
    return "{:.3f} [{:.3f}, {:.3f}]".format(*interval)
