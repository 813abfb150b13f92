"""What experiments share: how prompts are answered, in whose turn, and what runs come to.

An experiment is one file. It names

- its contestants: `EngineContestant(name, engine)`, or anything with a name and `run(requests) -> Run`;
- its plan: the prompt sets (`read_sets`) and one `Measure` for each way of answering them;
- the order: `warm_up`, then `take_turns`, in which everybody is first equally often;
- its figures: a record per row, made of runs by `tokens_per_second`, `tau`, `percentile`, `mismatches`,
  `paired_bootstrap`;
- its columns: `report.Column`s over that record, from which `report.table_of` makes the table.

What it returns is whether all texts were the same: a faster engine with another text would prove nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np

from drafters.registry import NoDrafter
from service.assembly import Assembly
from service.bench.driver import Run, generate
from service.engine.budget import FixedBudget
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams
from service.engine.stats import StepStats
from service.prompts import PromptSet, read_prompt_set, refuse_too_long

PLAIN = "plain"
SPECULATIVE = "speculative"

T = TypeVar("T")

_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)


class Contestant(Protocol):
    """Somebody who answers requests."""

    name: str

    def run(self, requests: Sequence[GenerationRequest]) -> Run: ...


class EngineContestant:
    """One of our own engines."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.latest: Run | None = None
        self._engine = engine

    def run(self, requests: Sequence[GenerationRequest]) -> Run:
        """Answer all requests together."""
        self.latest = generate(self._engine, requests)
        return self.latest


@dataclass(frozen=True, slots=True)
class Measure:
    """How each prompt is to be answered."""

    temperature: float
    max_tokens: int
    concurrency: int
    seed: int


def plain_contestant(assembly: Assembly) -> EngineContestant:
    return EngineContestant(PLAIN, assembly.engine(drafter=NoDrafter(), policy=FixedBudget(0)))


def read_sets(assembly: Assembly, files: Sequence[Path], limit: int | None, max_tokens: int) -> list[PromptSet]:
    """The prompts of all files. Raises StartupError where one leaves no room for its answer."""
    sets = [read_prompt_set(file, assembly.tokenizer, limit=limit) for file in files]
    for file, prompts in zip(files, sets, strict=True):
        refuse_too_long(prompts.prompts, max_tokens, assembly.limits.max_model_len, f"prompt file {file}")
    return sets


def first_prompts(prompts: PromptSet, count: int) -> PromptSet:
    """The set's first prompts."""
    return replace(prompts, prompts=prompts.prompts[:count])


def requests_from(prompts: Sequence[Sequence[int]], first: int, measure: Measure) -> list[GenerationRequest]:
    """The requests that run together from the prompt with this number on."""
    chosen = prompts[first : first + measure.concurrency]
    return [
        GenerationRequest(
            request_id=f"prompt-{index}",
            prompt=prompt,
            sampling=SamplingParams(
                seed=measure.seed + index,
                max_tokens=measure.max_tokens,
                temperature=measure.temperature,
                ignore_eos=True,  # equal lengths for everybody
            ),
        )
        for index, prompt in enumerate(chosen, start=first)
    ]


def rotated(contestants: Sequence[T], turn: int) -> list[T]:
    """The order of a turn: everybody is first equally often, and nobody always follows the same one."""
    shift = turn % len(contestants)
    order = [*contestants[shift:], *contestants[:shift]]
    return order[:1] + order[:0:-1] if turn // len(contestants) % 2 else order


def take_turns(
    prompts: Sequence[Sequence[int]],
    contestants: Sequence[Contestant],
    measure: Measure,
    advance: Callable[[int], None] = lambda prompts: None,
    *,
    last: Sequence[Contestant] = (),
) -> dict[str, list[Run]]:
    """Every contestant's runs over the prompts, by its name. A machine that slows down for a while slows all of them.

    `last` are those who need to know the others' answers. `advance` hears of prompts as they are done.
    """
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in [*contestants, *last]}
    for turn, first in enumerate(range(0, len(prompts), measure.concurrency)):
        requests = requests_from(prompts, first, measure)
        for contestant in [*rotated(contestants, turn), *last]:
            runs[contestant.name].append(contestant.run(requests))
        advance(len(requests))
    return runs


def warm_up(contestants: Sequence[Contestant], prompt: Sequence[int], measure: Measure) -> None:
    """One answer that is not measured: first calls allocate and choose code paths."""
    for contestant in contestants:
        contestant.run(requests_from([prompt] * measure.concurrency, 0, measure))


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


def accepted_by_source(runs: Iterable[Run]) -> dict[str, int]:
    """Accepted tokens by who had proposed them; one that several had proposed counts for each."""
    counts: Counter[str] = Counter()
    for run in runs:
        for step in run.steps:
            counts.update(step.stats.accepted_by_source)
    return dict(sorted(counts.items()))


def draft_share(runs: Iterable[Run]) -> float:
    """Share of the steps' time that went into drafting."""
    steps = [step for run in runs for step in run.steps]
    return sum(step.stats.draft_seconds for step in steps) / sum(step.seconds for step in steps)


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

    A turn's values in all columns are drawn together. # columns [column, turn]; figure [column, ...] -> [...]
    """
    turns = columns.shape[1]
    drawn = np.random.default_rng(seed).integers(turns, size=(_RESAMPLES, turns))
    low, high = np.percentile(figure(columns[:, drawn].sum(-1)), _INTERVAL)
    return float(figure(columns.sum(-1))), float(low), float(high)
