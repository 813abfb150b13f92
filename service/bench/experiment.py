"""The frame of an experiment: its parts, its prompts, turns, figures and report.

It returns whether all texts were the same: a faster engine with another text would prove nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table

from drafters.registry import NoDrafter
from service.assembly import Assembly, assemble
from service.bench.conditions import Conditions, conditions_of, refuse_unwritable, write_report
from service.bench.driver import Run
from service.config import ServiceConfig
from service.engine.budget import FixedBudget
from service.engine.engine import Engine, EngineLimits
from service.engine.requests import GenerationRequest, SamplingParams, Scope
from service.engine.stats import StepStats
from service.logging import counting
from service.prompts import PromptSet, read_prompt_set, refuse_too_long

PLAIN = "plain"
SPECULATIVE = "speculative"

Contestant = Callable[[Sequence[GenerationRequest]], Run]
"""Answers requests: `partial(generate, engine)`, or another engine on the same weights."""

T = TypeVar("T")
Row = dict[str, Any]
"""A line of the report as JSON shows it."""

Column = tuple[str, Callable[[Row], str]]
"""A title and what stands below it."""

_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Measure:
    """How each prompt is to be answered."""

    temperature: float
    max_tokens: int
    concurrency: int
    seed: int


def prepare(config: ServiceConfig, *files: Path | None) -> Assembly:
    """Everything as it is served. Raises StartupError, before loading for files that could not be written."""
    for file in files:
        refuse_unwritable(file)
    return assemble(config)


def conclude(
    assembly: Assembly,
    out: Path | None,
    rows: Sequence[object],
    summary: Mapping[str, object],
    *shown: RenderableType,
    beside: Conditions | None = None,
) -> bool:
    """Print what is to be shown and write the report, with conditions `beside` ours; whether no token differed."""
    return report({**conditions_of(assembly), **(beside or {})}, out, rows, summary, *shown)


def report(
    conditions: Conditions,
    out: Path | None,
    rows: Sequence[object],
    summary: Mapping[str, object],
    *shown: RenderableType,
) -> bool:
    """The same under conditions that are known."""
    Console().print(*shown, sep="\n")
    write_report(out, conditions, rows, summary)
    return summary.get("mismatched_tokens", 0) == 0


def plain_engine(assembly: Assembly, limits: EngineLimits | None = None) -> Engine:
    return assembly.engine(drafter=NoDrafter(), policy=FixedBudget(0), limits=limits)


def read_sets(assembly: Assembly, files: Sequence[Path], limit: int | None, max_tokens: int) -> list[PromptSet]:
    """The prompts of all files. Raises StartupError where one leaves no room for its answer."""
    sets = [read_prompt_set(file, assembly.tokenizer, limit=limit) for file in files]
    for file, prompts in zip(files, sets, strict=True):
        refuse_too_long(prompts.prompts, max_tokens, assembly.limits.max_model_len, f"prompt file {file}")
    return sets


def requests_from(prompts: Sequence[Sequence[int]], first: int, measure: Measure) -> list[GenerationRequest]:
    """Requests for the prompts in flight together, beginning with the first of them."""
    chosen = enumerate(prompts[first : first + measure.concurrency], first)
    return [request_of(number, prompt, measure) for number, prompt in chosen]


def request_of(
    number: int, prompt: Sequence[int], measure: Measure, *, client: str = "", ignore_eos: bool = True
) -> GenerationRequest:
    """Answers are equally long for everybody, unless the end of the text ends them."""
    sampling = SamplingParams(
        seed=measure.seed + number,
        max_tokens=measure.max_tokens,
        temperature=measure.temperature,
        ignore_eos=ignore_eos,
    )
    return GenerationRequest(request_id=str(number), prompt=prompt, sampling=sampling, scope=Scope(name=client))


def rotated(contestants: Sequence[T], turn: int) -> list[T]:
    """The order of a turn: everybody is first equally often, and nobody always follows the same one."""
    shift = turn % len(contestants)
    order = [*contestants[shift:], *contestants[:shift]]
    return order[:1] + order[:0:-1] if turn // len(contestants) % 2 else order


def take_turns(
    prompts: Sequence[Sequence[int]],
    contestants: Mapping[str, Contestant],
    measure: Measure,
    advance: Callable[[int], None] = lambda prompts: None,
    *,
    told: Mapping[str, Contestant] | None = None,
) -> dict[str, list[Run]]:
    """Every contestant's runs over the prompts, by name; the `told` go last, with plain answers as predictions."""
    told = told or {}
    runs: dict[str, list[Run]] = {name: [] for name in [*contestants, *told]}
    for turn, first in enumerate(range(0, len(prompts), measure.concurrency)):
        requests = requests_from(prompts, first, measure)
        for name in rotated(list(contestants), turn):
            runs[name].append(contestants[name](requests))
        for name, contestant in told.items():
            pairs = zip(requests, runs[PLAIN][-1].answers, strict=True)
            runs[name].append(contestant([replace(asked, prediction=answer.token_ids) for asked, answer in pairs]))
        advance(len(requests))
    return runs


def warm_up(contestants: Mapping[str, Contestant], prompt: Sequence[int], measure: Measure) -> None:
    """One answer that is not measured: first calls allocate and choose code paths."""
    take_turns([prompt] * measure.concurrency, contestants, measure)


def in_one_line(summary: Mapping[str, object]) -> str:
    figures = ((name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in summary.items())
    return ", ".join(f"{name} {value}" for name, value in figures)


@contextmanager
def counted(total: int, title: str = "") -> Iterator[Callable[..., None]]:
    """A bar while the block runs; what it yields is told how many more are done, and perhaps a new title."""
    with counting() as progress:
        task = progress.add_task(title, total=total)

        def advance(done: int, title: str | None = None) -> None:
            progress.update(task, advance=done, description=title)

        yield advance


def table_of(
    columns: Sequence[Column],
    rows: Sequence[Row],
    *,
    caption: str | None = None,
    section: Callable[[Row], object] = lambda row: None,
) -> Table:
    """One line per row; a rule wherever `section` changes."""
    table = Table(*(title for title, _ in columns), caption=caption)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        ends = following is None or section(row) != section(following)
        table.add_row(*(cell(row) for _, cell in columns), end_section=ends)
    return table


def tokens_per_second(runs: Sequence[Run]) -> float:
    """Generated tokens by all seconds, those of reading the prompts included."""
    return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)


def decode_tokens_per_second(runs: Iterable[Run]) -> float:
    """The same over the steps that read no prompt; 0 when there were none."""
    steps = [step for run in runs for step in run.steps if not step.stats.prompt_tokens]
    seconds = sum(step.seconds for step in steps)
    return sum(step.stats.emitted_tokens for step in steps) / seconds if seconds else 0.0


def tau(runs: Iterable[Run]) -> float:
    """Mean emitted tokens per verify of one sequence; 1 without speculation."""
    accepted = [count for run in runs for answer in run.answers for count in answer.accepted_per_step]
    return 1 + sum(accepted) / max(1, len(accepted))


def cost_errors(steps: Iterable[StepStats]) -> list[float]:
    """|predicted / measured - 1| of each verify whose seconds had been predicted."""
    return [
        abs(step.predicted_verify_seconds / step.verify_seconds - 1.0)
        for step in steps
        if step.predicted_verify_seconds is not None and step.verify_seconds > 0
    ]


def count_mismatches(expected: Sequence[int], got: Sequence[int]) -> int:
    """Positions at which two answers differ; one that ended sooner differs at every position it lacks."""
    common = sum(a == b for a, b in zip(expected, got, strict=False))
    return max(len(expected), len(got)) - common


def mismatches(expected: Sequence[Run], got: Sequence[Run]) -> int:
    """Positions at which the answers of two contestants differ."""
    return sum(
        count_mismatches(one.token_ids, other.token_ids)
        for before, after in zip(expected, got, strict=True)
        for one, other in zip(before.answers, after.answers, strict=True)
    )


def percentile(
    values: Iterable[float], percent: float, *, method: Literal["inverted_cdf", "linear"] = "inverted_cdf"
) -> float:
    """The smallest value that so many per cent do not exceed; 0 of nothing."""
    found = list(values)
    return float(np.percentile(found, percent, method=method)) if found else 0.0


def paired_bootstrap(
    figure: Callable[[np.ndarray], np.ndarray], columns: np.ndarray, *, seed: int
) -> tuple[float, float, float]:
    """`figure` of the columns' sums over all turns, and what holds 95 % of it when turns are drawn anew.

    columns [column, turn], figure [column, ...] -> [...]
    """
    turns = columns.shape[1]
    drawn = np.random.default_rng(seed).integers(turns, size=(_RESAMPLES, turns))
    low, high = np.percentile(figure(columns[:, drawn].sum(-1)), _INTERVAL)
    return float(figure(columns.sum(-1))), float(low), float(high)
