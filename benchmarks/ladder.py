"""`python -m benchmarks ladder`: what clients get over HTTP under rising load, of requests that arrive by chance.

Requests arrive whether or not earlier ones are answered (a Poisson process). All servers get the same requests at the
same times, one server after the other, in turns whose order changes, and no prompt is sent twice to any. Ratios are of
the time from arrival to the last token, over the first server's, paired by request: below 1 is faster.
"""

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Annotated

import typer

from service.bench import experiment
from service.bench.commands import AnswerTokens, MorePromptFiles, Out, PromptFiles, Seed, Temperature, names
from service.bench.driver import Answer, Run
from service.bench.experiment import Column, Row, counted, figures_of, mismatches, rate_ratio, report, shown, table_of
from service.bench.serve import Entrants, bodies_of, configurations
from service.bench.servers import HttpClient, Json
from service.conditions import refuse_unwritable, surroundings
from service.config import LoadedConfig
from service.errors import StartupError

_SERVERS = "plain,again:drafter=none,adaptive,fixed:budget_policy=fixed/max_budget=2"
_MOST_AT_ONCE = 256


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    files: MorePromptFiles = None,
    rates: Annotated[str, typer.Option(metavar="R,...", help="Requests a second.")] = "0.25,0.5,1,2,4,8,16",
    seconds: Annotated[float, typer.Option(min=1, help="Time in which the requests of a turn arrive.")] = 12.0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each server at each rate.")] = 3,
    servers: Annotated[str, typer.Option(metavar="NAME[:SETTING=VALUE/...],...", help="As of bench serve.")] = _SERVERS,
    temperature: Temperature = 0.0,
    max_tokens: AnswerTokens = 64,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Measure servers under rising load, and print times to the first token, per token and to the last one."""
    refuse_unwritable(out)
    fields = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed, "ignore_eos": True}
    bodies = list(chain.from_iterable(bodies_of(file, None, fields) for file in (*prompts, *(files or ()))))
    random.Random(seed).shuffle(bodies)
    entrants, steps = Entrants(loaded.config, configurations(servers, {}), {}, "none", stream=True), names(rates)
    arrivals = arrivals_of([float(rate) for rate in steps], seconds, turns, seed)
    asked = sum(map(len, chain.from_iterable(arrivals)))
    if asked > len(bodies):
        raise StartupError(f"--prompts: {asked} different prompts are needed, the files hold {len(bodies)}")
    left, rows = iter(bodies), list[Row]()
    with entrants.clients() as clients, counted(asked * len(clients)) as advance:
        for rate, of_rate in zip(steps, arrivals, strict=True):
            answers: dict[str, list[Answer]] = {name: [] for name in clients}
            for turn, moments in enumerate(of_rate):
                batch = list(islice(left, len(moments)))
                for name in experiment.rotated(list(clients), turn):
                    answers[name] += answered(clients[name], batch, moments)
                    advance(len(batch))
            rows += rows_of(float(rate), answers)
    summary = {"mismatched_tokens": sum(row["mismatched_tokens"] for row in rows)}
    return report(surroundings(), out, rows, summary, table_of(_COLUMNS, rows, section=lambda row: row["rate"]))


def arrivals_of(rates: Sequence[float], seconds: float, turns: int, seed: int) -> list[list[list[float]]]:
    """Draw the seconds at which the requests of each turn of each rate arrive, at least one."""
    rng = random.Random(seed)

    def turn_of(rate: float) -> list[float]:
        moments = [0.0]
        while (following := moments[-1] + rng.expovariate(rate)) < seconds:
            moments.append(following)
        return moments

    return [[turn_of(rate) for _ in range(turns)] for rate in rates]


def answered(client: HttpClient, bodies: Sequence[Json], moments: Sequence[float]) -> list[Answer]:
    """Send each request at its moment, and wait for all answers."""
    start = time.perf_counter()

    def send(body: Json, moment: float) -> Answer:
        time.sleep(max(0.0, start + moment - time.perf_counter()))
        return client.send([body], 1).answers[0]

    with ThreadPoolExecutor(_MOST_AT_ONCE) as clients:
        return list(clients.map(send, bodies, moments))


def rows_of(rate: float, answers: Mapping[str, Sequence[Answer]]) -> list[Row]:
    """Return the figures of all servers at a rate."""
    runs = {name: [Run((one,), (), one.seconds) for one in mine] for name, mine in answers.items()}
    first = next(iter(runs.values()))
    return [
        {
            "rate": rate,
            "server": name,
            **figures_of(mine),
            "time_over_first": rate_ratio([(run.seconds, 1) for run in mine], [(run.seconds, 1) for run in first]),
            "mismatched_tokens": mismatches(first, mine),
        }
        for name, mine in runs.items()
    ]


_COLUMNS: tuple[Column, ...] = (
    ("requests/s", lambda row: f"{row['rate']:g}"),
    ("server", lambda row: row["server"]),
    ("requests", lambda row: str(row["completed"])),
    ("TTFT", lambda row: f"{row['median_ttft_ms']:.0f}"),
    ("p99", lambda row: f"{row['p99_ttft_ms']:.0f}"),
    ("TPOT", lambda row: f"{row['median_tpot_ms']:.1f}"),
    ("p99", lambda row: f"{row['p99_tpot_ms']:.1f}"),
    ("to the last token", lambda row: f"{row['mean_e2el_ms']:.0f}"),
    ("over the first server", lambda row: shown(row["time_over_first"])),
    ("tau", lambda row: f"{row['tau'] or 1:.2f}"),
    ("mismatched", lambda row: str(row["mismatched_tokens"])),
)
