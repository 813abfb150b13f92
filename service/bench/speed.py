"""Plain against speculative decoding of the same prompts, in one process and in turn.

Contestants alternate prompt by prompt, and who goes first alternates too, so that a machine that slows down for a while
slows all of them. They are compared token by token as well: a faster engine with another text would prove nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, geometric_mean
from typing import Protocol

from service.bench.generate import (
    Run,
    accepted_by_source,
    count_mismatches,
    decode_tokens_per_second,
    draft_share,
    generate,
    tau,
    tokens_per_second,
)
from service.bench.prompts import PromptSet
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams

PLAIN = "plain"
SPECULATIVE = "speculative"


class Contestant(Protocol):
    """Somebody who answers requests."""

    name: str

    def run(self, requests: Sequence[GenerationRequest]) -> Run: ...


class EngineContestant:
    """One of our own engines."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self._engine = engine

    def run(self, requests: Sequence[GenerationRequest]) -> Run:
        """Answer all requests together."""
        return generate(self._engine, requests)


@dataclass(frozen=True, slots=True)
class Measure:
    """How each prompt is to be answered."""

    temperature: float
    max_tokens: int
    concurrency: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """The result for one prompt set. Tokens per second include reading the prompts, except in the `decode` columns."""

    set: str
    temperature: float
    concurrency: int
    prompts: int
    tokens: int
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    speedup: float
    plain_decode_tokens_per_second: float
    speculative_decode_tokens_per_second: float
    decode_speedup: float
    tau: float
    draft_share: float
    mismatched_tokens: int
    accepted_by_source: dict[str, int]
    peers: dict[str, float]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def measure_set(
    prompts: PromptSet,
    contestants: Sequence[Contestant],
    measure: Measure,
    advance: Callable[[int], None] = lambda prompts: None,
) -> SpeedRow:
    """Let every contestant answer every prompt. `advance` hears of prompts as they are done."""
    return _row(prompts, take_turns(prompts, contestants, measure, advance), measure)


def take_turns(
    prompts: PromptSet,
    contestants: Sequence[Contestant],
    measure: Measure,
    advance: Callable[[int], None] = lambda prompts: None,
) -> dict[str, list[Run]]:
    """Every contestant's runs over the prompts, by its name."""
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
    groups = range(0, len(prompts.prompts), measure.concurrency)
    for turn, first in enumerate(groups):
        requests = requests_from(prompts.prompts, first, measure)
        for contestant in rotated(contestants, turn):
            runs[contestant.name].append(contestant.run(requests))
        advance(len(requests))
    return runs


def warm_up(contestants: Sequence[Contestant], prompt: Sequence[int], measure: Measure) -> None:
    """One answer that is not measured: first calls allocate and choose code paths."""
    for contestant in contestants:
        contestant.run(requests_from([prompt] * measure.concurrency, 0, measure))


def rotated(contestants: Sequence[Contestant], turn: int) -> list[Contestant]:
    """The order of a turn: everybody is first equally often, and nobody always follows the same one."""
    shift = turn % len(contestants)
    order = [*contestants[shift:], *contestants[:shift]]
    return order[:1] + order[:0:-1] if turn // len(contestants) % 2 else order


def summary_of(rows: Sequence[SpeedRow]) -> dict[str, object]:
    """All sets together, and by temperature; means over sets, that of the speedup geometric."""
    temperatures = dict.fromkeys(row.temperature for row in rows)
    groups = [[row for row in rows if row.temperature == temperature] for temperature in temperatures]
    return {
        **_means(rows),
        "by_temperature": [{"temperature": mine[0].temperature, **_means(mine)} for mine in groups],
    }


def _means(rows: Sequence[SpeedRow]) -> dict[str, object]:
    return {
        "sets": len(rows),
        "tokens": sum(row.tokens for row in rows),
        "speedup": geometric_mean([row.speedup for row in rows]),
        "lowest_speedup": min(row.speedup for row in rows),
        "tau": fmean(row.tau for row in rows),
        "draft_share": fmean(row.draft_share for row in rows),
        "mismatched_tokens": sum(row.mismatched_tokens for row in rows),
    }


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


def _row(prompts: PromptSet, runs: dict[str, list[Run]], measure: Measure) -> SpeedRow:
    plain, speculative = runs[PLAIN], runs[SPECULATIVE]
    speeds = {name: tokens_per_second(mine) for name, mine in runs.items()}
    decode = [decode_tokens_per_second(mine) for mine in (plain, speculative)]
    return SpeedRow(
        set=prompts.name,
        temperature=measure.temperature,
        concurrency=measure.concurrency,
        prompts=len(prompts.prompts),
        tokens=sum(run.num_tokens for run in plain),
        plain_tokens_per_second=speeds[PLAIN],
        speculative_tokens_per_second=speeds[SPECULATIVE],
        speedup=speeds[SPECULATIVE] / speeds[PLAIN],
        plain_decode_tokens_per_second=decode[0],
        speculative_decode_tokens_per_second=decode[1],
        decode_speedup=decode[1] / decode[0] if decode[0] else 1.0,
        tau=tau(speculative),
        draft_share=draft_share(speculative),
        mismatched_tokens=mismatches(plain, speculative),
        accepted_by_source=accepted_by_source(speculative),
        peers={name: speed for name, speed in speeds.items() if name not in (PLAIN, SPECULATIVE)},
    )


def mismatches(plain: Sequence[Run], speculative: Sequence[Run]) -> int:
    """Positions at which the answers of two contestants differ."""
    return sum(
        count_mismatches(expected.token_ids, got.token_ids)
        for before, after in zip(plain, speculative, strict=True)
        for expected, got in zip(before.answers, after.answers, strict=True)
    )
