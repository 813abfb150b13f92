"""Driving an engine by hand: some requests in, all their answers out, with what each step reported.

No thread and no HTTP, so that what is measured is the engine itself.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from service.engine.engine import Engine
from service.engine.requests import FinishReason, GenerationRequest, SequenceOutput
from service.engine.stats import StepStats


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished generation."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    accepted_per_step: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step's report and how long the step took by the clock on the wall."""

    stats: StepStats
    seconds: float
    emitted: Mapping[str, int] = field(default_factory=dict)  # tokens by request


@dataclass(frozen=True, slots=True)
class Run:
    """Answers in the order of their requests, and the steps that made them."""

    answers: tuple[Answer, ...]
    steps: tuple[TimedStep, ...]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


def generate(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    *,
    before_step: Callable[[int], None] = lambda number: None,
) -> Run:
    """Answer all requests together; each of them asks for one sequence. `before_step` hears of each step's number."""
    outputs: defaultdict[str, list[SequenceOutput]] = defaultdict(list)
    steps: list[TimedStep] = []
    start = last = time.perf_counter()
    for request in requests:
        engine.add(request)
    while not engine.idle:
        before_step(len(steps))
        report = engine.step()
        for output in report.outputs:
            outputs[output.request_id].append(output)
        assert report.stats is not None, "the engine has work but schedules nothing"
        now = time.perf_counter()
        emitted = {output.request_id: len(output.token_ids) for output in report.outputs}
        steps.append(TimedStep(report.stats, now - last, emitted))
        last = now
    answers = tuple(_answer(outputs[request.request_id]) for request in requests)
    return Run(answers, tuple(steps), last - start)


def tokens_per_second(runs: Iterable[Run]) -> float:
    """Generated tokens by all seconds, those of reading the prompts included."""
    runs = list(runs)
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


def count_mismatches(expected: Sequence[int], got: Sequence[int]) -> int:
    """Positions at which two answers differ; one that ended sooner differs at every position it lacks."""
    common = sum(a == b for a, b in zip(expected, got, strict=False))
    return max(len(expected), len(got)) - common


def _answer(outputs: Sequence[SequenceOutput]) -> Answer:
    last = outputs[-1]
    return Answer(
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason,
        accepted_per_step=last.speculation.accepted_per_step if last.speculation else (),
    )
