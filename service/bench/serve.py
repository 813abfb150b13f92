"""`adaptree bench serve`: what a client gets over HTTP from servers of this configuration, and from others, in turn.

All servers run side by side, and one of them works at a time. Ours start anew for each number of clients, so that none
has seen the prompts. Figures have the names and meanings of `vllm bench serve`; ratios are to the first server.
"""

import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from operator import itemgetter
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from service.bench.driver import ClosedLoop, PoissonArrivals, Run
from service.bench.experiment import Column, Row, counted, in_turn, mismatches, report, table_of, tau
from service.bench.http_client import HttpClient, Json
from service.bench.intervals import rate_ratio, shown, speed_ratio
from service.bench.processes import one_server
from service.conditions import Conditions, refuse_unwritable, surroundings
from service.config import ServiceConfig
from service.errors import StartupError
from service.text.prompts import PromptLine, read_lines

_ROUNDS = 4  # requests of each of several clients in a turn
_ARRIVALS = 32  # requests at random times in a turn
_STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": np.mean,
    "median": np.median,
    "p99": partial(np.percentile, q=99),
}
_GREETING = {"messages": [{"role": "user", "content": "Hello."}], "prompt": "Hello."}


@dataclass(frozen=True, slots=True)
class Entrants:
    """The servers that are compared."""

    config: ServiceConfig
    ours: Mapping[str, Mapping[str, str]]  # changed settings by name
    others: Mapping[str, str]  # URLs of running servers by name
    api_key: str  # of those
    stream: bool

    @contextmanager
    def clients(self) -> Iterator[dict[str, HttpClient]]:
        """Start our servers, one after another; yield a client of each server by name. SIGTERM ends them too."""
        with ExitStack() as stack:
            clients = {}
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)))
            for name, changes in self.ours.items():
                server = stack.enter_context(one_server(self.config, **changes))
                clients[name] = HttpClient(name, server.url, stream=self.stream, pid=server.running.pid)
            for name, url in self.others.items():
                clients[name] = HttpClient(name, url, stream=self.stream, api_key=self.api_key)
            yield clients


def configurations(text: str, others: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return changed settings by name of `plain,adaptive,small:max_budget=8/memory=off`. `plain` drafts nothing; other
    names are free. Raises StartupError for a name that comes twice."""
    found: dict[str, dict[str, str]] = {}
    for name, _, changes in (part.partition(":") for part in re.split(r",(?![^(]*\))", text)):
        if not name or name in {**found, **others}:
            raise StartupError(f"--servers {text}: name each server once, as in plain,again:drafter=none,adaptive")
        pairs = (change.partition("=")[::2] for change in re.split(r"/(?=[\w.]+=)", changes) if change)
        found[name] = {**({"drafter": "none"} if name == "plain" else {}), **dict(pairs)}
    return found


def bodies_of(file: Path, limit: int | None, fields: Mapping[str, int | float]) -> list[Json]:
    """Return the bodies of requests for a file's prompts: chat completions where a prompt is a chat. A request's number
    is added to the seed."""
    lines = islice(read_lines(file, PromptLine, "prompt file"), limit)
    prompts = [{"messages": line.chat} if line.chat else {"prompt": line.prompt} for _, line in lines]
    if not prompts:
        raise StartupError(f"prompt file {file} holds no prompt")
    return [{**fields, "seed": fields["seed"] + number, **prompt} for number, prompt in enumerate(prompts)]


def run_serve(
    entrants: Entrants,
    sets: Mapping[str, Sequence[Json]],
    loads: Sequence[int],
    *,
    rate: float | None,
    out: Path | None,
) -> bool:
    """Measure all servers on each set of bodies with each number of clients, or with `rate` requests per second at
    random times. Returns whether our servers answered with the same tokens."""
    refuse_unwritable(out)
    rows: list[Row] = []
    with counted(len(loads) * sum(map(len, sets.values()))) as advance:
        for (name, bodies), clients in product(sets.items(), loads):
            rows += ({"set": name, **row} for row in measured(entrants, bodies, clients, rate, advance))
    config, reference = entrants.config, rows[0]["server"]
    settings: Conditions = {"model": config.model, "load_dtype": config.load_dtype, "threads": config.num_threads}
    over, servers = f"over_{reference}", dict.fromkeys(row["server"] for row in rows)
    ratios = {name: [row[over][0] for row in rows if row["server"] == name and over in row] for name in servers}
    summary = {
        "mismatched_tokens": sum(row["mismatched_tokens"] or 0 for row in rows),
        f"mean_{over}": {name: geometric_mean(some) for name, some in ratios.items() if some},
    }
    columns: list[Column] = [
        (title.format(reference), partial(_cell, key.format(reference), form)) for title, key, form in _COLUMNS
    ]
    table = table_of(columns, rows, caption=_CAPTION, section=itemgetter("set", "clients"))
    return report({**surroundings(), **settings}, out, rows, summary, table)


def measured(
    entrants: Entrants, bodies: Sequence[Json], clients: int, rate: float | None, advance: Callable[[int], None]
) -> list[Row]:
    """Let all servers answer in turn; return a row for each. One client sends one request in a turn."""
    size = _ARRIVALS if rate is not None else _ROUNDS * clients if clients > 1 else 1

    def send(client: HttpClient, batch: Sequence[Json]) -> Run:
        at_random = None if rate is None else PoissonArrivals(rate, len(batch), seed=batch[0]["seed"])
        return client.send(batch, at_random or ClosedLoop(clients))

    with entrants.clients() as asking:
        for client in asking.values():
            client.send([{name: _GREETING.get(name, value) for name, value in bodies[0].items()}], ClosedLoop(1))
            client.spent = np.zeros(2)
        batches = (bodies[first : first + size] for first in range(0, len(bodies), size))
        runs = in_turn(batches, {name: partial(send, client) for name, client in asking.items()}, advance)
    load = {"clients": clients if rate is None else None, "rate": rate}
    rows = [{"server": name, **load, **figures_of(mine), **ratios_of(mine, runs)} for name, mine in runs.items()]
    for row in rows[: len(entrants.ours)]:
        spent = asking[row["server"]].spent / row["total_output_tokens"]
        row |= zip(("context_switches_per_token", "cpu_seconds_per_token"), spent.tolist(), strict=True)
        row["mismatched_tokens"] = mismatches(runs[rows[0]["server"]], runs[row["server"]])
    return rows


def figures_of(runs: Sequence[Run]) -> Row:
    """Return the figures of one server's turns. Whole answers have no gaps, and none are listed then."""
    answers = [answer for run in runs for answer in run.answers]
    seconds, tokens = sum(run.seconds for run in runs), sum(run.num_tokens for run in runs)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    in_parts = [answer for answer in answers if answer.gaps_seconds]
    times = {
        "ttft": [answer.first_token_seconds for answer in answers],
        "tpot": [sum(answer.gaps_seconds) / (len(answer.token_ids) - 1) for answer in in_parts],
        "itl": [gap for answer in in_parts for gap in answer.gaps_seconds],
        "e2el": [answer.seconds for answer in answers],
    }
    named = ((f"{name}_{what}_ms", of, some) for what, some in times.items() for name, of in _STATISTICS.items())
    return {
        "turns": len(runs),
        "duration": seconds,
        "completed": len(answers),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": tokens,
        "request_throughput": len(answers) / seconds,
        "output_throughput": tokens / seconds,
        "total_token_throughput": (prompt_tokens + tokens) / seconds,
        **{name: 1000 * float(of(some)) for name, of, some in named if some},
        "tau": tau(runs) if any(answer.accepted_per_step for answer in answers) else None,
        "mismatched_tokens": None,
    }


def ratios_of(mine: Sequence[Run], runs: Mapping[str, Sequence[Run]]) -> Row:
    """Return the ratios of a server's speeds to those of the first one; decoding is measured of single answers."""
    reference, first = next(iter(runs.items()))
    ratios: Row = {} if mine is first else {f"over_{reference}": speed_ratio(mine, first)}
    decoded = [[run.decoded for run in some] for some in (mine, first)]
    tokens, seconds = map(sum, zip(*decoded[0], strict=True))
    if seconds and all(len(run.answers) == 1 for run in mine):
        ratios["decode_throughput"] = tokens / seconds
        if mine is not first:
            ratios[f"decode_over_{reference}"] = rate_ratio(*decoded)
    return ratios


def _cell(key: str, form: str, row: Row) -> str:
    value = row.get(key)
    return "" if value is None else shown(value) if isinstance(value, tuple) else form.format(value)


_COLUMNS = (
    ("set", "set", "{}"),
    ("server", "server", "{}"),
    ("clients", "clients", "{}"),
    ("tokens/s", "output_throughput", "{:.1f}"),
    ("decode", "decode_throughput", "{:.1f}"),
    ("TTFT", "median_ttft_ms", "{:.0f}"),
    ("p99", "p99_ttft_ms", "{:.0f}"),
    ("TPOT", "median_tpot_ms", "{:.1f}"),
    ("p99", "p99_tpot_ms", "{:.1f}"),
    ("ITL p99", "p99_itl_ms", "{:.1f}"),
    ("tau", "tau", "{:.2f}"),
    ("over {}", "over_{}", ""),
    ("decode over {}", "decode_over_{}", ""),
    ("switches", "context_switches_per_token", "{:.1f}"),
    ("CPU s", "cpu_seconds_per_token", "{:.4f}"),
    ("mismatched", "mismatched_tokens", "{}"),
)
_CAPTION = (
    "tokens/s: all of the time; decode: after the first token; TTFT, TPOT, ITL: milliseconds to the first token, per "
    "further token and between chunks, medians; switches, CPU s: of the server, per token"
)
