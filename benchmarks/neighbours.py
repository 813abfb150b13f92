"""What a busy client does to the latency of a quiet one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from benchmarks.options import PromptFile
from service.assembly import Assembly
from service.bench.commands import AnswerTokens, Out
from service.bench.experiment import conclude, counted, prepare
from service.config import LoadedConfig
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams
from service.prompts import read_prompt_set, refuse_too_long
from service.scope import Scope

QUIET, BUSY = "quiet", "busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourRow:
    """The quiet client's requests, from question to end of answer."""

    quiet_streams: int
    busy_streams: int
    answers: int
    latency_p50_seconds: float
    latency_p95_seconds: float
    ttft_p95_seconds: float
    tokens_per_second: float  # of both clients together
    quiet_tokens_per_second: float


class Neighbours:
    """Drives an engine by hand, as two clients that always ask as much as they may."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> None:
        self._engine = engine
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._numbers = count()
        self._asked: dict[str, float] = {}
        self._first: dict[str, float] = {}

    def run(self, *, quiet: int, busy: int, answers: int, watch: Callable[[], None] = lambda: None) -> NeighbourRow:
        """Until the quiet client has so many answers. `watch` hears of each of them."""
        for client, streams in ((BUSY, busy), (QUIET, quiet)):
            for _ in range(streams):
                self._ask(client)
        latencies: list[float] = []
        firsts: list[float] = []
        tokens = {QUIET: 0, BUSY: 0}
        start = time.perf_counter()
        while len(latencies) < answers:
            for output in self._engine.step().outputs:
                client = output.request_id.partition(" ")[0]
                tokens[client] += len(output.token_ids)
                self._first.setdefault(output.request_id, time.perf_counter())
                if output.finish_reason is not None:
                    asked, first = self._asked.pop(output.request_id), self._first.pop(output.request_id)
                    self._ask(client)
                    if client == QUIET:
                        latencies.append(time.perf_counter() - asked)
                        firsts.append(first - asked)
                        watch()
        seconds = time.perf_counter() - start
        self._stop()
        return NeighbourRow(
            quiet_streams=quiet,
            busy_streams=busy,
            answers=len(latencies),
            latency_p50_seconds=float(np.quantile(latencies, 0.5)),
            latency_p95_seconds=float(np.quantile(latencies, 0.95)),
            ttft_p95_seconds=float(np.quantile(firsts, 0.95)),
            tokens_per_second=sum(tokens.values()) / seconds,
            quiet_tokens_per_second=tokens[QUIET] / seconds,
        )

    def _ask(self, client: str) -> None:
        number = next(self._numbers)
        name = f"{client} {number}"
        self._asked[name] = time.perf_counter()
        self._engine.add(
            GenerationRequest(
                request_id=name,
                prompt=self._prompts[number % len(self._prompts)],
                sampling=SamplingParams(seed=0, max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True),
                scope=Scope(name=client),
            )
        )

    def _stop(self) -> None:
        for name in list(self._asked):
            self._engine.abort(name)
        self._asked.clear()
        self._first.clear()


_TURNS = 2  # alone and beside, so often in turn, because a machine's speed drifts


def run(
    loaded: LoadedConfig,
    prompts: PromptFile,
    quiet: Annotated[int, typer.Option(min=1, help="Streams of the client that is measured.")] = 1,
    busy: Annotated[int, typer.Option(min=1, help="Streams of the other one.")] = 9,
    answers: Annotated[int, typer.Option(min=2, help="Answers to measure in each of four turns.")] = 20,
    max_tokens: AnswerTokens = 64,
    out: Out = None,
) -> bool:
    """What a busy client does to the latency of a quiet one."""
    assembly = prepare(loaded.config, out)
    texts = read_prompt_set(prompts, assembly.tokenizer).prompts
    refuse_too_long(texts, max_tokens, assembly.limits.max_model_len, "--max-tokens")
    rows = _measure(assembly, texts, quiet=quiet, busy=busy, answers=answers, max_tokens=max_tokens)
    ratio = slowdown(rows)
    return conclude(assembly, out, rows, {"p95_loaded_to_alone": ratio}, _table(rows, ratio))


def slowdown(rows: Sequence[NeighbourRow]) -> float:
    """95th percentile of the latency beside the others, to that alone, both averaged over the turns."""
    alone = [row.latency_p95_seconds for row in rows if not row.busy_streams]
    beside = [row.latency_p95_seconds for row in rows if row.busy_streams]
    return sum(beside) / len(beside) / (sum(alone) / len(alone))


def _measure(
    assembly: Assembly, prompts: Sequence[Sequence[int]], *, quiet: int, busy: int, answers: int, max_tokens: int
) -> list[NeighbourRow]:
    streams = [0, busy] * _TURNS
    with counted(answers * len(streams), "answering") as advance:
        return [
            Neighbours(assembly.engine(), prompts, max_tokens=max_tokens).run(
                quiet=quiet, busy=others, answers=answers, watch=lambda: advance(1)
            )
            for others in streams
        ]


def _table(rows: Sequence[NeighbourRow], ratio: float) -> Table:
    table = Table("streams", "others'", "latency p50", "p95", "first token p95", "tokens/s", "of them its own")
    for row in rows:
        seconds = (row.latency_p50_seconds, row.latency_p95_seconds, row.ttft_p95_seconds)
        table.add_row(
            str(row.quiet_streams),
            str(row.busy_streams),
            *(f"{value:.2f} s" for value in seconds),
            f"{row.tokens_per_second:.0f}",
            f"{row.quiet_tokens_per_second:.0f}",
        )
    table.caption = f"p95 beside the others is {ratio:.2f} times that alone"
    return table
