"""What sizes and times of a stream tell of the prompt: somebody who sees nothing else of an encrypted answer has learnt
how each of some prompts is answered, under other noise, and guesses which of them was asked."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import typer
import uvicorn

from benchmarks.observing import listening
from service.api.app import create_app
from service.assembly import Assembly
from service.bench.commands import AnswerTokens, MorePromptFiles, Out, PromptFiles, Seed, Temperature
from service.bench.experiment import Column, Row, conclude, counted, prepare, read_sets, rotated, table_of
from service.config import LoadedConfig
from service.engine.thread import EngineThread
from service.observability.live import Live
from service.runtime import Runtime, ServedModel
from service.serve import api_settings, card_of, metrics_of, rendered

_FIRST = 48  # packets that are looked at one by one
_QUANTILES = np.linspace(0, 100, 11)
_SHRINKAGE = 0.5  # of the covariance of standardised features towards none


@dataclass(frozen=True, slots=True)
class Trace:
    """What is seen of one answer, and, for those who hold the key, its text."""

    sizes: tuple[int, ...]  # bytes of each packet
    seconds: tuple[float, ...]  # since the request was sent
    text: str


def features_of(trace: Trace) -> np.ndarray:
    """Of one answer: its first packets, and how all of them are distributed. # -> [features]"""
    gaps = [after - before for before, after in pairwise((0.0, *trace.seconds))]
    columns = [np.array(column, dtype=np.float64) for column in (trace.sizes, gaps)]
    firsts = [np.pad(column[:_FIRST], (0, max(0, _FIRST - len(column)))) for column in columns]
    spreads = [np.percentile(column, _QUANTILES) for column in columns]
    sums = np.array([len(trace.sizes), sum(trace.sizes), trace.seconds[-1]])
    return np.concatenate([*firsts, *spreads, sums])


def accuracies(seen: np.ndarray, known: np.ndarray, asked: np.ndarray, answers: np.ndarray) -> dict[str, float]:
    """Share of right guesses by the nearest mean, and by the one nearest in units of what varies within a prompt.

    seen [seen, features] of prompts known [seen]; asked [asked, features] of prompts answers [asked]
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
    """Ask and watch: a chunk of HTTP is what a record of TLS would be."""
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
    """Options of streams, by name."""
    return {
        "per_step": {},
        "obfuscated": {"include_obfuscation": True},
        "constant_rate": {"release_seconds": release_seconds},
    }


async def _watch(
    assembly: Assembly, bodies: Sequence[Sequence[dict[str, Any]]], ways: Mapping[str, dict[str, Any]]
) -> dict[str, list[list[Trace]]]:
    """By way, run and prompt; ways take turns, because a machine's speed drifts. # bodies: by run and prompt"""
    metrics, live = metrics_of(assembly.config), Live()
    runtime = Runtime(
        lambda: ServedModel(EngineThread(assembly.engine()), assembly.tokenizer, card_of(assembly)), max_waiting=1
    )
    settings = api_settings(assembly.config.model_copy(update={"api_keys": ()}))
    app = create_app(runtime, settings, live=live, render_metrics=lambda: rendered(metrics, runtime, settings.tenants))
    traces: dict[str, list[list[Trace]]] = {way: [[] for _ in bodies] for way in ways}
    async with listening(uvicorn.Config(app, port=0, log_config=None, log_level="warning", access_log=False)) as url:
        await runtime.wait_until_loaded()
        port = int(url.rpartition(":")[2])
        with counted(sum(map(len, bodies)) * len(ways), "watching") as advance:
            for run, of_run in enumerate(bodies):
                for turn, body in enumerate(of_run):
                    for way in rotated(list(ways), turn):
                        traces[way][run].append(await trace_of(port, {**body, "stream_options": ways[way]}))
                        advance(1)
    return traces


def row_of(way: str, runs: Sequence[Sequence[Trace]], learnt: int) -> Row:
    """The first `learnt` runs are learnt from, the others are guessed."""
    features = np.stack([features_of(trace) for run in runs for trace in run])
    prompts = np.tile(np.arange(len(runs[0])), len(runs))
    split = learnt * len(runs[0])
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


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    limit: Annotated[int, typer.Option(min=2, help="How many prompts may have been asked.")] = 50,
    learn: Annotated[int, typer.Option(min=2, help="Answers to each that are learnt from.")] = 8,
    guess: Annotated[int, typer.Option(min=1, help="Answers to each that are guessed.")] = 4,
    release_seconds: Annotated[float, typer.Option(min=0.001, max=10, help="Of the constant rate, per token.")] = 0.03,
    max_tokens: AnswerTokens = 64,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Which prompt was asked, guessed from sizes and times alone: as steps bring tokens, padded, at a constant rate."""
    assembly = prepare(loaded.config, out)
    sets = read_sets(assembly, [*prompts, *(more_prompts or [])], None, max_tokens)
    texts = [prompt for one in sets for prompt in one.prompts][:limit]
    fields = {"model": assembly.config.public_model_name, "stream": True, "ignore_eos": True}
    fields |= {"max_tokens": max_tokens, "temperature": temperature}
    bodies = [
        [{**fields, "prompt": list(text), "seed": seed + number} for text in texts] for number in range(learn + guess)
    ]
    traces = asyncio.run(_watch(assembly, bodies, ways_of(release_seconds)))
    rows = [row_of(way, runs, learn) for way, runs in traces.items()]
    same = [[[trace.text for trace in run] for run in runs] for runs in traces.values()]
    mismatched = sum(texts != same[0] for texts in same)
    caption = f"one of {len(texts)} prompts, {learn} answers learnt from, {guess} guessed"
    summary = {"prompts": len(texts), "chance": 1 / len(texts), "mismatched_tokens": mismatched}
    return conclude(assembly, out, rows, summary, table_of(_COLUMNS, rows, caption=caption))


_COLUMNS: tuple[Column, ...] = (
    ("way", lambda row: row["way"]),
    ("chance", lambda row: f"{row['chance']:.3f}"),
    ("nearest mean", lambda row: f"{row['nearest']:.3f}"),
    ("discriminant", lambda row: f"{row['discriminant']:.3f}"),
    ("sizes", lambda row: str(row["sizes"])),
    ("packets", lambda row: f"{row['packets']:.1f}"),
    ("kB", lambda row: f"{row['bytes'] / 1000:.1f}"),
    ("seconds to last token", lambda row: f"{row['seconds_to_last']:.2f}"),
)
