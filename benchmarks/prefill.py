"""What a long prompt does to streams that are already running, with prompts read in chunks and in one go."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.options import PromptFile
from service.assembly import Assembly
from service.bench.commands import Out
from service.bench.experiment import conclude, percentile, prepare
from service.config import LoadedConfig
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams, SequenceOutput
from service.logging import counting
from service.prompts import read_prompt_set, refuse_too_long

_SETTLED_TOKENS = 16
_LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow:
    """One way of reading the prompt. Latencies are the streams' while the long prompt is read."""

    prefill_chunk: int
    streams: int
    prompt_tokens: int
    ttft_seconds: float
    itl_p50_seconds: float
    itl_p99_seconds: float
    itl_max_seconds: float
    quiet_itl_p50_seconds: float  # before the long prompt arrived
    mismatched_tokens: int  # against the first way


@dataclass(frozen=True, slots=True)
class Observed:
    """What one run saw."""

    ttft_seconds: float
    quiet_gaps: list[float]
    busy_gaps: list[float]
    tokens: dict[str, list[int]]


def observe(
    engine: Engine, stream_prompts: Sequence[Sequence[int]], long_prompt: Sequence[int], *, max_tokens: int
) -> Observed:
    """Start the streams, let each emit some tokens, send the long prompt, and run everything to its end."""
    watch = _Watch()
    for index, prompt in enumerate(stream_prompts):
        engine.add(_request(f"stream-{index}", prompt, max_tokens))
    watch.step_until(engine, lambda: watch.least_tokens(len(stream_prompts)) >= _SETTLED_TOKENS)
    quiet, arrival = watch.take_gaps(), time.perf_counter()
    engine.add(_request(_LONG, long_prompt, 1))
    watch.step_until(engine, lambda: _LONG in watch.tokens)
    ttft, busy = time.perf_counter() - arrival, watch.take_gaps()
    watch.step_until(engine, lambda: engine.idle)
    return Observed(ttft, quiet, busy, watch.tokens)


def row_of(observed: Observed, reference: Observed, *, prefill_chunk: int, prompt_tokens: int) -> PrefillRow:
    """The figures of one run, its text compared with that of `reference`."""
    return PrefillRow(
        prefill_chunk=prefill_chunk,
        streams=len(observed.tokens) - 1,
        prompt_tokens=prompt_tokens,
        ttft_seconds=observed.ttft_seconds,
        itl_p50_seconds=percentile(observed.busy_gaps, 50, method="linear"),
        itl_p99_seconds=percentile(observed.busy_gaps, 99, method="linear"),
        itl_max_seconds=max(observed.busy_gaps),
        quiet_itl_p50_seconds=percentile(observed.quiet_gaps, 50, method="linear"),
        mismatched_tokens=sum(
            mine != theirs
            for name, tokens in observed.tokens.items()
            for mine, theirs in zip(tokens, reference.tokens[name], strict=True)
        ),
    )


class _Watch:
    """Tokens and gaps between outputs of every sequence, as the engine steps."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self._last: dict[str, float] = {}
        self._gaps: list[float] = []

    def step_until(self, engine: Engine, done: Callable[[], bool]) -> None:
        while not done():
            outputs = engine.step().outputs
            now = time.perf_counter()
            for output in outputs:
                self._note(output, now)

    def least_tokens(self, streams: int) -> int:
        counts = [len(tokens) for tokens in self.tokens.values()]
        return min(counts) if len(counts) == streams else 0

    def take_gaps(self) -> list[float]:
        """Gaps seen since the last call."""
        gaps, self._gaps = self._gaps, []
        return gaps

    def _note(self, output: SequenceOutput, now: float) -> None:
        self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if output.request_id in self._last:
            self._gaps.append(now - self._last[output.request_id])
        self._last[output.request_id] = now


def _request(name: str, prompt: Sequence[int], max_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id=name, prompt=prompt, sampling=sampling)


def run(
    loaded: LoadedConfig,
    prompts: PromptFile,
    streams: Annotated[int, typer.Option(min=1, help="Streams that run when the long prompt arrives.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the long prompt.")] = 3000,
    max_tokens: Annotated[int, typer.Option(min=32, help="Length of each stream's answer.")] = 256,
    out: Out = None,
) -> bool:
    """What a long prompt does to running streams, read in chunks and in one go."""
    assembly = prepare(loaded.config, out)
    texts = read_prompt_set(prompts, assembly.tokenizer).prompts
    long_prompt = list(islice(cycle([token for prompt in texts for token in prompt]), prompt_tokens))
    refuse_too_long([long_prompt], 1, assembly.limits.max_model_len, "--prompt-tokens")
    rows = _measure(assembly, list(islice(cycle(texts), streams)), long_prompt, max_tokens)
    summary = {"mismatched_tokens": sum(row.mismatched_tokens for row in rows)}
    return conclude(assembly, out, rows, summary, _table(rows))


def _measure(
    assembly: Assembly, prompts: Sequence[Sequence[int]], long_prompt: Sequence[int], max_tokens: int
) -> list[PrefillRow]:
    chunks = (assembly.limits.prefill_chunk, len(long_prompt))
    with counting() as progress:
        seen = [
            observe(_engine(assembly, chunk), prompts, long_prompt, max_tokens=max_tokens)
            for chunk in progress.track(chunks, description="reading the long prompt")
        ]
    return [
        row_of(observed, seen[0], prefill_chunk=chunk, prompt_tokens=len(long_prompt))
        for chunk, observed in zip(chunks, seen, strict=True)
    ]


def _engine(assembly: Assembly, chunk: int) -> Engine:
    return assembly.engine(limits=replace(assembly.limits, prefill_chunk=chunk))


def _table(rows: Sequence[PrefillRow]) -> Table:
    table = Table(
        "prompt chunk", "time to first token", "itl p50", "itl p99", "itl max", "itl p50 before", "mismatched"
    )
    for row in rows:
        seconds = (row.itl_p50_seconds, row.itl_p99_seconds, row.itl_max_seconds, row.quiet_itl_p50_seconds)
        latencies = [f"{1000 * value:.0f} ms" for value in seconds]
        table.add_row(str(row.prefill_chunk), f"{row.ttft_seconds:.2f} s", *latencies, str(row.mismatched_tokens))
    table.caption = "inter-token latency of the running streams while the long prompt is read"
    return table
