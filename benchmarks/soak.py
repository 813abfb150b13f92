"""`python -m benchmarks soak`: one server process for hours under a changing load: memory, slots and texts.

Loads follow each other: clients that ask for whole answers and for streams, disconnect in the middle, or send invalid
requests. After all loads comes a rest, in which no slot may be in use.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Annotated, Any, NamedTuple

import httpx
import numpy as np
import psutil
import typer

from adaptation.publisher import t_quantile
from benchmarks.shared import in_one_line, read_chats
from benchmarks.streams import Received, answers_alone, ask, metric, questions, slots_at_rest
from service.bench.commands import AnswerTokens, Limit, Out, Seed
from service.bench.experiment import Row, counted, report, table_of
from service.bench.lossless import BUILT_IN
from service.bench.servers import Process, one_server
from service.conditions import refuse_unwritable, surroundings
from service.config import LoadedConfig

_MIB = 1024**2
_SETTLING = 0.25  # of the rests, while caches fill
_LEAST_RESTS = 4  # for a line
_BOUND = 0.95
_ACTS = {"stream": 0.6, "leave": 0.25, "whole": 0.1, "refused": 0.05}


class Growth(NamedTuple):
    """Growth of memory in MiB per hour."""

    slope: float
    upper: float  # bound of a 95 % interval


def growth_of(hours: Sequence[float], mebibytes: Sequence[float]) -> Growth | None:
    """Fit a line through all points but the first quarter; None for too few points."""
    first = int(_SETTLING * len(hours))
    x, y = np.array(hours[first:]), np.array(mebibytes[first:])
    if len(x) < _LEAST_RESTS:
        return None
    slope, start = linear_regression(x, y)
    residuals, freedom = y - (start + slope * x), len(x) - 2
    error = math.sqrt(residuals @ residuals / freedom / (len(x) * x.var()))
    return Growth(slope, slope + error * t_quantile(_BOUND, freedom))


@dataclass
class _Soak:
    """The clients of one server, and their counts."""

    server: Process
    client: httpx.AsyncClient
    bodies: Sequence[Mapping[str, Any]]
    rng: random.Random
    answers_alone: Sequence[Received] = ()
    acts: Counter[str] = field(default_factory=Counter)
    mismatched_tokens: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    rests: list[Row] = field(default_factory=list)

    async def cycle(self, loads: Sequence[int], seconds: float, began: float) -> None:
        """Run all loads in random order, and a rest."""
        done = Counter(self.acts)
        await metric(self.client, self.server.url, "event_loop_lag_seconds")  # resets the maximum
        for load in self.rng.sample(loads, len(loads)):
            deadline = time.monotonic() + seconds
            await asyncio.gather(*(self._client_until(deadline) for _ in range(load)))
        lag = await metric(self.client, self.server.url, "event_loop_lag_seconds")
        slots = await slots_at_rest(self.client, self.server.url)
        self.rests.append(
            {
                "hours": (time.monotonic() - began) / 3600,
                "memory_mib": self._own_bytes() / _MIB,
                "slots_in_use": slots,
                "event_loop_lag_seconds": lag,
                **(self.acts - done),
            }
        )

    async def _client_until(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            (act,) = self.rng.choices([*_ACTS], [*_ACTS.values()])
            self.acts[act] += 1
            await self._act(act, self.rng.randrange(len(self.bodies)))

    async def _act(self, act: str, number: int) -> None:
        body, expected, leaves_after = dict(self.bodies[number]), self.answers_alone[number], None
        if act == "leave":
            leaves_after = self.rng.randrange(1, max(2, expected.num_tokens))
        elif act == "whole":
            body |= {"stream": False, "stream_options": None}
        elif act == "refused":
            body["messages"] = []
        said = await ask(self.client, self.server.url, body, leaves_after=leaves_after)
        if act == "refused":
            if said.failure is None or not said.failure.startswith("400: "):
                self.failures.append(f"a request without messages was answered: {said.failure}")
        elif said.failure is not None:
            self.failures.append(said.failure)
        else:
            self.tokens += said.num_tokens
            self.mismatched_tokens += said.differs(expected)

    def _own_bytes(self) -> int:
        """Return memory without pages of files, which the system drops and reads again at any time."""
        process = psutil.Process(self.server.running.pid)
        each = [one.memory_full_info() for one in (process, *process.children(recursive=True))]
        return sum(one.rss - one.shared + one.swap for one in each)


async def _run(soak: _Soak, loads: Sequence[int], *, minutes: float, seconds: float) -> None:
    soak.answers_alone = await answers_alone(soak.client, soak.server.url, soak.bodies)
    began, deadline = time.monotonic(), time.monotonic() + 60 * minutes
    with counted(round(minutes / (len(loads) * seconds / 60)), "cycles") as advance:
        while time.monotonic() < deadline:
            try:
                await soak.cycle(loads, seconds, began)
            except httpx.HTTPError as error:
                soak.failures.append(f"the server no longer answers: {error!r}")
                return
            advance(1)


def loads_of(most: int) -> tuple[int, ...]:
    """Return numbers of clients, from one to `most`."""
    return tuple(dict.fromkeys(max(1, most * quarters // 4) for quarters in (0, 1, 2, 4)))


def summary_of(soak: _Soak) -> dict[str, object]:
    """Return the figures of the whole run."""
    growth = growth_of(*([row[name] for row in soak.rests] for name in ("hours", "memory_mib")))
    return {
        "hours": soak.rests[-1]["hours"] if soak.rests else 0.0,
        "requests": soak.acts.total(),
        "tokens_compared": soak.tokens,
        "mismatched_tokens": soak.mismatched_tokens,
        "failed_requests": len(soak.failures),
        "slots_lost": max((row["slots_in_use"] for row in soak.rests), default=0.0),  # share of all
        "growth_mib_per_hour": None if growth is None else growth.slope,
        "growth_upper_mib_per_hour": None if growth is None else growth.upper,
        "memory_mib": soak.rests[-1]["memory_mib"] if soak.rests else 0.0,
        "event_loop_lag_seconds": max((row["event_loop_lag_seconds"] for row in soak.rests), default=0.0),
    }


def run(
    loaded: LoadedConfig,
    prompts: Annotated[
        Path, typer.Option(metavar="FILE", help="JSONL file with messages, turns or prompt.")
    ] = BUILT_IN,
    limit: Limit = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Duration, at least.")] = 120.0,
    clients: Annotated[int, typer.Option(min=1, help="Clients of the heaviest load.")] = 16,
    load_seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of each load.")] = 30.0,
    max_tokens: AnswerTokens = 64,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Serve for hours under a changing load; report growth of memory, lost slots, and texts that differ."""
    refuse_unwritable(out)
    bodies = questions(loaded.config.public_model_name, read_chats(prompts, limit=limit), max_tokens)
    limits = httpx.Limits(max_connections=None)
    with one_server(loaded.config) as server:
        assert server.ready

        async def all_of_it() -> _Soak:
            async with httpx.AsyncClient(limits=limits, timeout=60) as client:
                soak = _Soak(server, client, bodies, random.Random(seed))
                await _run(soak, loads_of(clients), minutes=minutes, seconds=load_seconds)
                return soak

        soak = asyncio.run(all_of_it())
    summary = summary_of(soak)
    conditions = {**surroundings(), "model": loaded.config.model}
    shown = [] if not soak.rests else [table_of(_COLUMNS, soak.rests)]
    same = report(conditions, out, soak.rests, summary, *shown, *soak.failures[:3])
    print(in_one_line(summary))
    return same and not soak.failures and not summary["slots_lost"]


_COLUMNS = (
    ("hours", lambda row: f"{row['hours']:.2f}"),
    ("MiB", lambda row: f"{row['memory_mib']:.1f}"),
    ("slots in use", lambda row: f"{row['slots_in_use']:.3f}"),
    ("event loop's longest block", lambda row: f"{1000 * row['event_loop_lag_seconds']:.0f} ms"),
    *((act, lambda row, act=act: str(row.get(act, 0))) for act in _ACTS),
)
