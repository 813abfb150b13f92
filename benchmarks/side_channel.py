"""`python -m benchmarks side-channel`: which of some prompts another client sent, guessed from what an attacker sees.

`packets`: sizes and times of an encrypted stream. The attacker knows answers to each prompt, under other noise.
`past-answers`: seconds, steps and draft trees of own requests, after one of the prompts was answered for the victim.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
import typer
import uvicorn

from drafters.protocol import MemorySizes
from service.api.app import create_app
from service.assembly import Assembly
from service.bench.commands import AnswerTokens, MorePromptFiles, Out, PromptFiles, Seed, Temperature
from service.bench.driver import ClosedLoop, Drive
from service.bench.experiment import Column, Row, conclude, counted, prepare, read_sets, rotated, table_of
from service.config import LoadedConfig
from service.engine.engine import Engine, EngineOutput
from service.engine.requests import GenerationRequest, SamplingParams, Scope, SpeculationParams
from service.engine.thread import EngineThread
from service.observability.live import Live
from service.runtime import Runtime, ServedModel
from service.serve import api_settings, card_of, metrics_of, rendered

_FIRST = 48  # packets that are single features
_QUANTILES = np.linspace(0, 100, 11)
_SHRINKAGE = 0.5  # of the covariance of standardised features towards the identity
_STARTING_SECONDS = 60.0
_VICTIM = Scope("one", "u", separate_names=True)
WALLS = {
    "none": (_VICTIM, _VICTIM),
    "name": (_VICTIM, replace(_VICTIM, name="v")),
    "key": (_VICTIM, replace(_VICTIM, key="two")),
    "no keys": (Scope(name="u"), Scope(name="v")),
}
"""Scopes of the victim and of the attacker, by what separates them."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The packets of one answer, and its text, which the attacker does not see."""

    sizes: tuple[int, ...]  # bytes of each packet
    seconds: tuple[float, ...]  # since the request was sent
    text: str


def features_of(trace: Trace) -> np.ndarray:
    """Return features of an answer: its first packets, and the distribution of all. -> [features]"""
    gaps = [after - before for before, after in pairwise((0.0, *trace.seconds))]
    columns = [np.array(column, dtype=np.float64) for column in (trace.sizes, gaps)]
    firsts = [np.pad(column[:_FIRST], (0, max(0, _FIRST - len(column)))) for column in columns]
    spreads = [np.percentile(column, _QUANTILES) for column in columns]
    sums = np.array([len(trace.sizes), sum(trace.sizes), trace.seconds[-1]])
    return np.concatenate([*firsts, *spreads, sums])


def accuracies(seen: np.ndarray, known: np.ndarray, asked: np.ndarray, answers: np.ndarray) -> dict[str, float]:
    """Return the share of right guesses by nearest mean, and by linear discriminant.

    seen: known answers [seen, features] to the prompts known [seen]; asked: answers to guess [asked, features], whose
    prompts are answers [asked]
    """
    mean, deviation = seen.mean(0), seen.std(0)
    varies = deviation > 1e-9
    seen, asked = ((rows[:, varies] - mean[varies]) / deviation[varies] for rows in (seen, asked))
    prompts = np.unique(known)
    means = np.stack([seen[known == prompt].mean(0) for prompt in prompts])
    offsets = asked[:, None] - means[None]  # [asked, prompts, features]
    within = seen - means[np.searchsorted(prompts, known)]
    covariance = (1 - _SHRINKAGE) * within.T @ within / len(within) + _SHRINKAGE * np.eye(seen.shape[1])
    distances = np.einsum("apf,fg,apg->ap", offsets, np.linalg.inv(covariance), offsets, optimize=True)
    guesses = {"nearest": np.abs(offsets).sum(-1).argmin(1), "discriminant": distances.argmin(1)}
    return {name: float((prompts[guess] == answers).mean()) for name, guess in guesses.items()}


async def trace_of(port: int, body: Mapping[str, Any]) -> Trace:
    """Send a request and record the HTTP chunks of its answer, each of which would be a TLS record."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(sent)}\r\n"
    began = time.perf_counter()
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + sent)
    status = await reader.readuntil(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 200"), status
    sizes, seconds, content = [], [], b""
    while size := int(await reader.readline(), 16):
        content += (await reader.readexactly(size + 2))[:-2]
        sizes.append(size)
        seconds.append(time.perf_counter() - began)
    writer.close()
    return Trace(tuple(sizes), tuple(seconds), _text(content.decode()))


def _text(content: str) -> str:
    lines = [line.removeprefix("data: ") for line in content.split("\n") if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


def ways_of(release_seconds: float) -> dict[str, dict[str, Any]]:
    """Return stream options by name."""
    return {
        "per_step": {},
        "obfuscated": {"include_obfuscation": True},
        "constant_rate": {"release_seconds": release_seconds},
    }


async def _watch(
    assembly: Assembly, bodies: Sequence[Sequence[dict[str, Any]]], ways: Mapping[str, dict[str, Any]]
) -> dict[str, list[list[Trace]]]:
    """Return traces by way, run and prompt, of bodies by run and prompt; ways take turns."""
    metrics, live = metrics_of(assembly.config), Live()
    runtime = Runtime(
        lambda: ServedModel(
            EngineThread(assembly.engine(), num_threads=assembly.config.num_threads),
            assembly.tokenizer,
            card_of(assembly),
        ),
        max_waiting=2,
    )
    settings = api_settings(assembly.config.model_copy(update={"api_keys": ()}))
    app = create_app(
        runtime, settings, live=live, render_metrics=lambda: rendered(metrics, live, runtime, settings.tenants)
    )
    traces: dict[str, list[list[Trace]]] = {way: [[] for _ in bodies] for way in ways}
    async with _listening(uvicorn.Config(app, port=0, log_config=None, log_level="warning", access_log=False)) as url:
        await runtime.wait_until_loaded()
        port = int(url.rpartition(":")[2])
        with counted(sum(map(len, bodies)) * len(ways), "watching") as advance:
            for run, of_run in enumerate(bodies):
                for turn, body in enumerate(of_run):
                    for way in rotated(list(ways), turn):
                        traces[way][run].append(await trace_of(port, {**body, "stream_options": ways[way]}))
                        advance(1)
    return traces


@asynccontextmanager
async def _listening(config: uvicorn.Config) -> AsyncIterator[str]:
    """Serve on a free port inside the block; yield the address."""
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


def row_of(way: str, runs: Sequence[Sequence[Trace]], known: int) -> Row:
    """Guess the prompts of all but the first `known` runs, whose prompts the attacker knows."""
    features = np.stack([features_of(trace) for run in runs for trace in run])
    prompts = np.tile(np.arange(len(runs[0])), len(runs))
    split = known * len(runs[0])
    traces = [trace for run in runs for trace in run]
    return {
        "way": way,
        "chance": 1 / len(runs[0]),
        **accuracies(features[:split], prompts[:split], features[split:], prompts[split:]),
        "sizes": len({size for trace in traces for size in trace.sizes}),
        "packets": float(np.mean([len(trace.sizes) for trace in traces])),
        "bytes": float(np.mean([sum(trace.sizes) for trace in traces])),
        "seconds_to_last": float(np.mean([trace.seconds[-1] for trace in traces])),
    }


@dataclass(frozen=True, slots=True)
class Look:
    """What an attacker sees of one own request."""

    seconds: float
    steps: int
    trees: list[set[str]]  # paths of each step's tree


def guessed(seen: Sequence[Look], before: Sequence[Look], asked: int) -> dict[str, float]:
    """Compare looks at all prompts before and after the victim sent number `asked`.

    `by_seconds` and `by_steps`: 1 where that prompt saves most, its share where several save as much; `trees_changed`:
    share of prompts with another tree."""
    pairs = list(zip(before, seen, strict=True))
    saved = {
        "by_seconds": [then.seconds - now.seconds for then, now in pairs],
        "by_steps": [float(then.steps - now.steps) for then, now in pairs],
    }
    right = {way: (of[asked] == max(of)) / of.count(max(of)) for way, of in saved.items()}
    return {**right, "trees_changed": sum(then.trees != now.trees for then, now in pairs) / len(pairs)}


def _look(engine: Engine, prompt: Sequence[int], scope: Scope, max_tokens: int, *, traced: bool, store: bool) -> Look:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    speculation = SpeculationParams(trace=traced)
    request = GenerationRequest(
        request_id="look", prompt=prompt, sampling=sampling, scope=scope, store=store, speculation=speculation
    )
    trees: list[set[str]] = []

    def keep(report: EngineOutput) -> None:
        for tree in (output.tree for output in report.outputs if output.tree is not None):
            paths: list[str] = []
            for token, parent in zip(tree.tokens, tree.parents, strict=True):
                paths.append(f"{paths[parent] if parent >= 0 else ''} {token}")
            trees.append(set(paths))

    drive = Drive(engine, [request], ClosedLoop(1), after_step=keep)
    drive.go_on()
    found = drive.result()
    return Look(found.seconds, sum(step.stats.emitted_tokens > 0 for step in found.steps), trees)


def _past_answers_row(assembly: Assembly, wall: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Row:
    victim, attacker = WALLS[wall]
    sizes = MemorySizes(
        num_bytes=assembly.config.memory_bytes,
        owners=2 if victim.key else 1,
        scopes=assembly.limits.max_sequences,
        has_keys=bool(victim.key),
    )
    engine = assembly.engine(limits=replace(assembly.limits, memory=sizes))

    def look() -> list[Look]:
        """Look at every prompt, with the trees of a second request. Nothing of the attacker is remembered."""
        plain = [_look(engine, prompt, attacker, max_tokens, traced=False, store=False) for prompt in prompts]
        traced = [_look(engine, prompt, attacker, max_tokens, traced=True, store=False) for prompt in prompts]
        return [replace(one, trees=other.trees) for one, other in zip(plain, traced, strict=True)]

    look()  # prompts are in the prefix cache from here on
    before = look()
    found = []
    with counted(len(prompts), f"wall: {wall}") as advance:
        for asked, prompt in enumerate(prompts):
            engine.drafter.forget()
            _look(engine, prompt, victim, max_tokens, traced=False, store=True)
            found.append(guessed(look(), before, asked))
            advance(1)
    return {"wall": wall, **{way: sum(one[way] for one in found) / len(found) for way in found[0]}}


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    seen: Annotated[
        Literal["packets", "past-answers"],
        typer.Option(
            help="What the attacker sees. past-answers needs --budget-policy fixed and --drafter memory, so that only "
            "past answers differ."
        ),
    ] = "packets",
    limit: Annotated[int, typer.Option(min=2, help="Prompts to guess from.")] = 50,
    learn: Annotated[int, typer.Option(min=2, help="packets: known answers to each prompt.")] = 8,
    guess: Annotated[int, typer.Option(min=1, help="packets: answers to guess of each prompt.")] = 4,
    release_seconds: Annotated[
        float, typer.Option(min=0.001, max=10, help="packets: seconds per token at the constant rate.")
    ] = 0.03,
    max_tokens: AnswerTokens = 64,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Guess which prompt another client sent: from packets sent per step, padded and at a constant rate, or from past
    answers behind each wall."""
    assembly = prepare(loaded.config, out)
    sets = read_sets(assembly, [*prompts, *(more_prompts or [])], None, max_tokens)
    texts = [prompt for one in sets for prompt in one.prompts][:limit]
    summary: dict[str, object] = {"prompts": len(texts), "chance": 1 / len(texts)}
    caption = f"one of {len(texts)} prompts, chance {1 / len(texts):.3f}"
    if seen == "past-answers":
        rows = [_past_answers_row(assembly, wall, texts, max_tokens) for wall in WALLS]
        return conclude(assembly, out, rows, summary, table_of(_PAST_ANSWERS, rows, caption=caption))
    fields = {"model": assembly.config.public_model_name, "stream": True, "ignore_eos": True}
    fields |= {"max_tokens": max_tokens, "temperature": temperature}
    bodies = [
        [{**fields, "prompt": list(text), "seed": seed + number} for text in texts] for number in range(learn + guess)
    ]
    traces = asyncio.run(_watch(assembly, bodies, ways_of(release_seconds)))
    rows = [row_of(way, runs, learn) for way, runs in traces.items()]
    same = [[[trace.text for trace in run] for run in runs] for runs in traces.values()]
    summary["mismatched_tokens"] = sum(answers != same[0] for answers in same)
    return conclude(assembly, out, rows, summary, table_of(_PACKETS, rows, caption=caption))


_PACKETS: tuple[Column, ...] = (
    ("way", lambda row: row["way"]),
    ("nearest mean", lambda row: f"{row['nearest']:.3f}"),
    ("discriminant", lambda row: f"{row['discriminant']:.3f}"),
    ("sizes", lambda row: str(row["sizes"])),
    ("packets", lambda row: f"{row['packets']:.1f}"),
    ("kB", lambda row: f"{row['bytes'] / 1000:.1f}"),
    ("seconds to last token", lambda row: f"{row['seconds_to_last']:.2f}"),
)
_PAST_ANSWERS: tuple[Column, ...] = (
    ("wall", lambda row: row["wall"]),
    ("right by seconds", lambda row: f"{row['by_seconds']:.3f}"),
    ("by steps", lambda row: f"{row['by_steps']:.3f}"),
    ("trees that differ", lambda row: f"{row['trees_changed']:.3f}"),
)
