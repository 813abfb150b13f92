"""What the prefix cache saves: time to first token of prompts that begin alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.options import PromptFile
from service.assembly import Assembly
from service.bench.commands import AnswerTokens, Out
from service.bench.driver import ClosedLoop, Drive
from service.bench.experiment import conclude, count_mismatches, counted, percentile, prepare
from service.config import LoadedConfig
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams
from service.prompts import read_prompt_set, refuse_too_long


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, one after the other: nobody else runs."""

    tokens: tuple[int, ...]
    first_token_seconds: float
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRow:
    """All requests with or without the cache."""

    prefix_cache: bool
    requests: int
    shared_tokens: int
    ttft_first_seconds: float
    ttft_later_p50_seconds: float
    ttft_later_p95_seconds: float
    cached_tokens: int
    mismatched_tokens: int  # against the run without the cache

    @property
    def ratio(self) -> float:
        """Of a later request's time to first token to the first one's."""
        return self.ttft_later_p50_seconds / self.ttft_first_seconds


def measure(
    engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int, watch: Callable[[], None] = lambda: None
) -> list[Asked]:
    """Ask everything, one after the other. `watch` hears of each prompt's end."""
    answers = []
    for number, prompt in enumerate(prompts):
        answers.append(ask(engine, prompt, max_tokens=max_tokens, name=str(number)))
        watch()
    return answers


def ask(engine: Engine, prompt: Sequence[int], *, max_tokens: int, name: str) -> Asked:
    """One greedy answer."""
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    request = GenerationRequest(request_id=name, prompt=prompt, sampling=sampling)
    cached: list[int] = []
    drive = Drive(
        engine,
        [request],
        ClosedLoop(1),
        after_step=lambda report: cached.extend(output.cached_tokens for output in report.outputs),
    )
    drive.go_on()
    (answer,) = drive.result().answers
    return Asked(answer.token_ids, answer.first_token_seconds, max(cached))


def row_of(asked: Sequence[Asked], reference: Sequence[Asked], *, prefix_cache: bool, shared_tokens: int) -> PrefixRow:
    """The figures of one way, its answers compared with those of `reference`."""
    later = [one.first_token_seconds for one in asked[1:]]
    return PrefixRow(
        prefix_cache=prefix_cache,
        requests=len(asked),
        shared_tokens=shared_tokens,
        ttft_first_seconds=asked[0].first_token_seconds,
        ttft_later_p50_seconds=percentile(later, 50, method="linear"),
        ttft_later_p95_seconds=percentile(later, 95, method="linear"),
        cached_tokens=sum(one.cached_tokens for one in asked),
        mismatched_tokens=sum(
            count_mismatches(theirs.tokens, mine.tokens) for mine, theirs in zip(asked, reference, strict=True)
        ),
    )


def run(
    loaded: LoadedConfig,
    prompts: PromptFile,
    requests: Annotated[int, typer.Option(min=2, help="Requests, one after the other.")] = 64,
    shared_tokens: Annotated[int, typer.Option(min=2, help="Tokens that all prompts begin with.")] = 1500,
    max_tokens: AnswerTokens = 16,
    out: Out = None,
) -> bool:
    """Time to first token of prompts that begin alike, with and without the prefix cache."""
    assembly = prepare(loaded.config, out)
    asked = prompts_alike(read_prompt_set(prompts, assembly.tokenizer).prompts, requests, shared_tokens)
    refuse_too_long(asked, max_tokens, assembly.limits.max_model_len, "--shared-tokens")
    rows = _measure(assembly, asked, shared_tokens, max_tokens)
    mismatched = sum(row.mismatched_tokens for row in rows)
    summary = {"mismatched_tokens": mismatched, "later_to_first": rows[0].ratio}
    return conclude(assembly, out, rows, summary, _table(rows))


def prompts_alike(prompts: Sequence[Sequence[int]], requests: int, shared_tokens: int) -> list[list[int]]:
    """So many prompts that share their first tokens: real text, then a prompt of the file each."""
    shared = list(islice(cycle([token for prompt in prompts for token in prompt]), shared_tokens))
    return [[*shared, *prompt] for prompt in islice(cycle(prompts), requests)]


def _measure(
    assembly: Assembly, prompts: Sequence[Sequence[int]], shared_tokens: int, max_tokens: int
) -> list[PrefixRow]:
    ways = (False, True)
    with counted(len(ways) * len(prompts), "asking") as advance:
        read, kept = (
            measure(
                assembly.engine(limits=replace(assembly.limits, prefix_cache=way)),
                prompts,
                max_tokens=max_tokens,
                watch=lambda: advance(1),
            )
            for way in ways
        )
    return [row_of(asked, read, prefix_cache=asked is kept, shared_tokens=shared_tokens) for asked in (kept, read)]


def _table(rows: Sequence[PrefixRow]) -> Table:
    table = Table("prefix cache", "first", "later p50", "later p95", "later / first", "cached tokens", "mismatched")
    for row in rows:
        seconds = (row.ttft_first_seconds, row.ttft_later_p50_seconds, row.ttft_later_p95_seconds)
        table.add_row(
            "on" if row.prefix_cache else "off",
            *(f"{1000 * value:.0f} ms" for value in seconds),
            f"{row.ratio:.3f}",
            str(row.cached_tokens),
            str(row.mismatched_tokens),
        )
    table.caption = f"time to first token of {rows[0].requests} prompts that share {rows[0].shared_tokens} tokens"
    return table
