"""`python -m benchmarks replicas`: streams that arrive at random while replicas behind one address are killed.

Measures what clients notice, and whether each answer is that of an idle server."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import httpx
import typer

from benchmarks.fleets import Fleet, on_ray, processes
from benchmarks.shared import in_one_line, percentile, read_chats
from benchmarks.streams import Received, answers_alone, ask, questions
from service.bench.commands import AnswerTokens, Limit, Out, Seed
from service.bench.experiment import Row, counted, report, table_of
from service.bench.lossless import BUILT_IN
from service.bench.servers import Servers
from service.conditions import refuse_unwritable, surroundings
from service.config import LoadedConfig

_ROW_SECONDS = 60.0
_FLEETS: Mapping[str, Callable[[Servers, int], AbstractContextManager[Fleet]]] = {"processes": processes, "ray": on_ray}


@dataclass(frozen=True, slots=True)
class ClientStream:
    """One stream of a client."""

    arrived: float  # seconds since the load began
    said: Received
    mismatched_tokens: int

    @property
    def latency_seconds(self) -> float:
        """Seconds to the last event."""
        return self.said.seconds[-1]

    @property
    def longest_gap_seconds(self) -> float:
        """The longest time between two events."""
        return max((after - before for before, after in pairwise(self.said.seconds)), default=0.0)


@dataclass
class Load:
    """Sends streams to a fleet and kills its replicas."""

    fleet: Fleet
    client: httpx.AsyncClient
    bodies: Sequence[Mapping[str, Any]]
    rng: random.Random
    expected: Sequence[Received] = ()
    began: float = 0.0
    seconds: float = 0.0
    streams: list[ClientStream] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)

    async def run(self, *, seconds: float, rate: float, kill_seconds: float) -> None:
        """Send streams for so many seconds, and wait until all have ended."""
        self.expected = await answers_alone(self.client, self.fleet.url, self.bodies)
        self.began = time.monotonic()
        killing = asyncio.create_task(self._kill(seconds, kill_seconds, random.Random(self.rng.random())))
        asked: list[asyncio.Task[None]] = []
        with counted(round(seconds), "seconds") as advance:
            while (elapsed := time.monotonic() - self.began) < seconds:
                asked.append(asyncio.create_task(self._ask(self.rng.randrange(len(self.bodies)))))
                pause = min(self.rng.expovariate(rate), seconds - elapsed)
                await asyncio.sleep(pause)
                advance(pause)
        await asyncio.gather(*asked)
        self.seconds = time.monotonic() - self.began
        await killing

    async def _ask(self, number: int) -> None:
        arrived = time.monotonic() - self.began
        said = await ask(self.client, self.fleet.url, self.bodies[number])
        self.streams.append(ClientStream(arrived, said, said.differs(self.expected[number])))

    async def _kill(self, seconds: float, every: float, rng: random.Random) -> None:
        """Kill a replica every so often, once all are ready again."""
        at = every
        while at < seconds:
            await asyncio.sleep(self.began + at - time.monotonic())
            self.kills.append(time.monotonic() - self.began)
            await asyncio.to_thread(self.fleet.kill_one, rng)
            at = max(at + every, time.monotonic() - self.began)


def figures_of(streams: Sequence[ClientStream], seconds: float) -> Row:
    """Return figures of the streams that arrived within so many seconds."""
    complete = [one for one in streams if one.said.is_complete]
    latencies = [one.latency_seconds for one in complete]
    firsts = [one.said.seconds[0] for one in complete]
    going_on = [one for stream in streams for one in stream.said.seconds_to_go_on]
    return {
        "streams": len(streams),
        "complete": len(complete),
        "equal": sum(one.mismatched_tokens == 0 for one in complete),
        "failed": sum(one.said.failure is not None for one in streams),
        "mismatched_tokens": sum(one.mismatched_tokens for one in streams),
        "tokens": sum(one.said.num_tokens for one in streams),
        "tokens_per_second": sum(one.said.num_tokens for one in streams) / seconds,
        "latency_p50_seconds": percentile(latencies, 50),
        "latency_p99_seconds": percentile(latencies, 99),
        "first_p50_seconds": percentile(firsts, 50),
        "first_p99_seconds": percentile(firsts, 99),
        "went_on": len(going_on),
        "to_go_on_p50_seconds": percentile(going_on, 50),
        "to_go_on_p99_seconds": percentile(going_on, 99),
        "longest_gap_seconds": max((one.longest_gap_seconds for one in streams), default=0.0),
    }


def rows_of(streams: Sequence[ClientStream], kills: Sequence[float], seconds: float) -> list[Row]:
    """Return a row for each minute, of the streams that arrived in it."""
    rows = []
    for minute in range(int(seconds // _ROW_SECONDS) + 1):
        begin, end = minute * _ROW_SECONDS, min(seconds, (minute + 1) * _ROW_SECONDS)
        mine = [one for one in streams if begin <= one.arrived < end]
        if mine:
            killed = sum(begin <= at < end for at in kills)
            rows.append({"minute": minute, "kills": killed, **figures_of(mine, end - begin)})
    return rows


def run(
    loaded: LoadedConfig,
    prompts: Annotated[
        Path, typer.Option(metavar="FILE", help="JSONL file with messages, turns or prompt.")
    ] = BUILT_IN,
    limit: Limit = None,
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas.")] = 2,
    on: Annotated[
        Literal["processes", "ray"], typer.Option(help="Behind adaptree ingress, or Ray Serve.")
    ] = "processes",
    minutes: Annotated[float, typer.Option(min=0.01, help="How long streams arrive.")] = 10.0,
    rate: Annotated[float, typer.Option(min=0.001, help="Streams per second, at random times.")] = 1.0,
    kill_seconds: Annotated[
        float, typer.Option(min=0.1, help="From one kill to the next, or until all replicas are ready again.")
    ] = 20.0,
    max_tokens: AnswerTokens = 64,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Send streams to replicas that are killed in turn; count complete, equal and failed ones, and their latencies."""
    refuse_unwritable(out)
    bodies = questions(loaded.config.public_model_name, read_chats(prompts, limit=limit), max_tokens)
    limits = httpx.Limits(max_connections=None)

    async def loaded_with(fleet: Fleet) -> Load:
        async with httpx.AsyncClient(limits=limits) as client:
            load = Load(fleet, client, bodies, random.Random(seed))
            await load.run(seconds=60 * minutes, rate=rate, kill_seconds=kill_seconds)
            return load

    with TemporaryDirectory() as folder, _FLEETS[on](Servers(loaded.config, Path(folder)), replicas) as fleet:
        load = asyncio.run(loaded_with(fleet))
    summary = {"kills": len(load.kills), "seconds": load.seconds, **figures_of(load.streams, load.seconds)}
    rows = rows_of(load.streams, load.kills, load.seconds)
    conditions = {**surroundings(), "model": loaded.config.model, "replicas": replicas, "on": on}
    failures = [one.said.failure for one in load.streams if one.said.failure is not None]
    same = report(conditions, out, rows, summary, table_of(_COLUMNS, rows), *failures[:3])
    print(in_one_line(summary))
    return same and not failures


_COLUMNS = (
    ("minute", lambda row: str(row["minute"])),
    ("kills", lambda row: str(row["kills"])),
    ("streams", lambda row: str(row["streams"])),
    ("complete", lambda row: str(row["complete"])),
    ("equal", lambda row: str(row["equal"])),
    ("failed", lambda row: str(row["failed"])),
    ("tokens/s", lambda row: f"{row['tokens_per_second']:.1f}"),
    ("latency p50", lambda row: f"{row['latency_p50_seconds']:.2f}"),
    ("p99", lambda row: f"{row['latency_p99_seconds']:.2f}"),
    ("went on", lambda row: str(row["went_on"])),
    ("to go on p50", lambda row: f"{row['to_go_on_p50_seconds']:.2f}"),
    ("p99", lambda row: f"{row['to_go_on_p99_seconds']:.2f}"),
)
