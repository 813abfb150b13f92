"""What being watched costs: the same requests with metrics, live state and a reader of both, and without any."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

import typer
import uvicorn
from rich.table import Table

from benchmarks.options import PromptFile
from service.api.app import create_app
from service.assembly import Assembly
from service.bench.commands import AnswerTokens, Concurrency, Limit, Out
from service.bench.experiment import conclude, count_mismatches, counted, prepare
from service.config import LoadedConfig
from service.engine.requests import GenerationRequest, SamplingParams
from service.engine.thread import EngineThread
from service.observability.live import Live
from service.prompts import read_prompt_set, refuse_too_long
from service.runtime import Runtime, ServedModel
from service.serve import api_settings, card_of, metrics_of, observed_by, rendered

_STARTING_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What a reader has read."""

    scrapes: int = 0
    moments: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One run over all requests."""

    watched: bool
    answers: tuple[tuple[int, ...], ...]
    seconds: float
    seen: Seen

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservingRow:
    """All turns of one way."""

    watched: bool
    turns: int
    tokens: int
    seconds: float
    tokens_per_second: float
    scrapes: int
    moments: int
    mismatched_tokens: int  # against the very first turn


async def run_turn(assembly: Assembly, requests: Sequence[GenerationRequest], *, streams: int, watched: bool) -> Turn:
    """Answer all requests, so many at a time."""
    metrics, live = metrics_of(assembly.config), Live()
    observe = observed_by(metrics, live) if watched else observed_by()
    served = assembly.engine()
    metrics.credit(served.drafter.sources)
    engine = EngineThread(served, observe)
    runtime = Runtime(
        lambda: ServedModel(engine, assembly.tokenizer, card_of(assembly)), max_waiting=assembly.config.max_waiting
    )
    is_open = {"api_keys": (), "admin_key": None, "open_metrics": True}
    settings = api_settings(assembly.config.model_copy(update=is_open))
    app = create_app(runtime, settings, live=live, render_metrics=lambda: rendered(metrics, runtime, settings.tenants))
    async with listening(uvicorn.Config(app, port=0, log_config=None, log_level="warning", access_log=False)) as url:
        await runtime.wait_until_loaded()
        async with _read(url) if watched else _unread() as seen:
            began = time.perf_counter()
            answers = await _answers(runtime, requests, streams)
            seconds = time.perf_counter() - began
    return Turn(watched, answers, seconds, seen[0])


def rows_of(turns: Sequence[Turn]) -> list[ObservingRow]:
    """The figures of both ways."""
    return [_row([turn for turn in turns if turn.watched == watched], turns[0]) for watched in (False, True)]


def _row(turns: Sequence[Turn], first: Turn) -> ObservingRow:
    tokens, seconds = sum(turn.num_tokens for turn in turns), sum(turn.seconds for turn in turns)
    pairs = [pair for turn in turns for pair in zip(first.answers, turn.answers, strict=True)]
    return ObservingRow(
        watched=turns[0].watched,
        turns=len(turns),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        scrapes=sum(turn.seen.scrapes for turn in turns),
        moments=sum(turn.seen.moments for turn in turns),
        mismatched_tokens=sum(count_mismatches(expected, got) for expected, got in pairs),
    )


async def _answers(
    runtime: Runtime, requests: Sequence[GenerationRequest], streams: int
) -> tuple[tuple[int, ...], ...]:
    answers: dict[str, tuple[int, ...]] = {}
    waiting: Iterator[GenerationRequest] = iter(requests)

    async def ask() -> None:
        for request in waiting:
            with runtime.generate(request) as generation:
                answers[request.request_id] = tuple(
                    [token async for output in generation for token in output.token_ids]
                )

    await asyncio.gather(*(ask() for _ in range(streams)))
    return tuple(answers[request.request_id] for request in requests)


@asynccontextmanager
async def listening(config: uvicorn.Config) -> AsyncIterator[str]:
    """A server on a free port. # -> its address"""
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(_STARTING_SECONDS):
            while not server.started:
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def _read(url: str) -> AsyncIterator[list[Seen]]:
    """A process reads meanwhile; what it saw is there at the end."""
    command = (sys.executable, "-m", "benchmarks.reader", url)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        await asyncio.wait_for(process.stdout.readline(), _STARTING_SECONDS)
        seen = [Seen()]
        yield seen
        last, _ = await process.communicate(b"")  # without input Python 3.11 leaves its standard input open
        seen[0] = Seen(**json.loads(last))
    finally:
        if process.returncode is None:
            process.kill()


@asynccontextmanager
async def _unread() -> AsyncIterator[list[Seen]]:
    """Nobody reads."""
    yield [Seen()]


def run(
    loaded: LoadedConfig,
    prompts: PromptFile,
    limit: Limit = None,
    max_tokens: AnswerTokens = 128,
    streams: Concurrency = 1,
    turns: Annotated[int, typer.Option(min=1, help="How often each way has its turn.")] = 4,
    out: Out = None,
) -> bool:
    """Tokens per second with metrics, live state and a reader of both, and without."""
    assembly = prepare(loaded.config, out)
    texts = read_prompt_set(prompts, assembly.tokenizer, limit=limit).prompts
    refuse_too_long(texts, max_tokens, assembly.limits.max_model_len, "--max-tokens")
    rows = rows_of(asyncio.run(_taking_turns(assembly, _requests(texts, max_tokens), streams, turns)))
    unwatched, watched = rows
    share = watched.tokens_per_second / unwatched.tokens_per_second
    mismatched = sum(row.mismatched_tokens for row in rows)
    summary = {"watched_to_unwatched": share, "mismatched_tokens": mismatched}
    return conclude(assembly, out, rows, summary, _table(rows, share))


async def _taking_turns(
    assembly: Assembly, requests: Sequence[GenerationRequest], streams: int, turns: int
) -> list[Turn]:
    """Both ways in turn, the first of each pair alternating, because a machine's speed drifts. One more comes first
    and is not counted: it reads the model's pages."""
    order = [way for number in range(turns) for way in ((False, True) if number % 2 else (True, False))]
    with counted(1 + len(order), "answering") as advance:
        done = []
        for watched in (False, *order):
            done.append(await run_turn(assembly, requests, streams=streams, watched=watched))
            advance(1)
    return done[1:]


def _requests(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[GenerationRequest]:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [
        GenerationRequest(request_id=str(number), prompt=prompt, sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]


def _table(rows: Sequence[ObservingRow], share: float) -> Table:
    table = Table("watched", "turns", "tokens/s", "scrapes", "moments of the feed", "mismatched")
    for row in rows:
        counts = (row.scrapes, row.moments, row.mismatched_tokens)
        table.add_row("yes" if row.watched else "no", str(row.turns), f"{row.tokens_per_second:.1f}", *map(str, counts))
    table.caption = f"watched, with a scrape a second and the feed followed: {share:.3f} of unwatched"
    return table
