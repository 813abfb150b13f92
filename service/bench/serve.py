"""`adaptree bench serve`: measures what clients get over HTTP from servers of this configuration, and from others.

All servers run at the same time, but only one answers at a time. Ours are restarted for each number of clients, so that
none has seen the prompts. Figures have the names and meanings of `vllm bench serve`; ratios are to the first server.
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

from service.bench.driver import Run
from service.bench.experiment import (
    Column,
    Row,
    counted,
    figures_of,
    in_turn,
    mismatches,
    rate_ratio,
    report,
    shown,
    speed_ratio,
    table_of,
)
from service.bench.servers import HttpClient, Json, one_server
from service.conditions import Conditions, refuse_unwritable, surroundings
from service.config import ServiceConfig
from service.errors import StartupError
from service.text.prompts import PromptLine, read_lines

_ROUNDS = 4  # requests that each client sends in a turn, if there are several clients
_GREETING = {"messages": [{"role": "user", "content": "Hello."}], "prompt": "Hello."}


@dataclass(frozen=True, slots=True)
class Entrants:
    """The servers to compare: ours, which are started, and others, which are running already."""

    config: ServiceConfig
    ours: Mapping[str, Mapping[str, str]]  # changed settings by name
    others: Mapping[str, str]  # URLs of running servers by name
    api_key: str  # key of the other servers
    stream: bool

    @contextmanager
    def clients(self) -> Iterator[dict[str, HttpClient]]:
        """Start our servers one after another, and yield a client of each server by name. Our servers are stopped after
        the block, also on SIGTERM."""
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
    """Parse --servers, such as `plain,adaptive,small:max_budget=8/memory=off`, to changed settings by name. `plain`
    drafts nothing; other names are free. Raises StartupError for an empty or repeated name."""
    found: dict[str, dict[str, str]] = {}
    for name, _, changes in (part.partition(":") for part in re.split(r",(?![^(]*\))", text)):
        if not name or name in {**found, **others}:
            raise StartupError(f"--servers {text}: name each server once, as in plain,again:drafter=none,adaptive")
        pairs = (change.partition("=")[::2] for change in re.split(r"/(?=[\w.]+=)", changes) if change)
        found[name] = {**({"drafter": "none"} if name == "plain" else {}), **dict(pairs)}
    return found


def bodies_of(file: Path, limit: int | None, fields: Mapping[str, int | float]) -> list[Json]:
    """Build the request bodies for a file's prompts: chat completions for chats, completions for texts. A request's
    number is added to the seed. Raises StartupError if there is no prompt."""
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
    out: Path | None,
) -> bool:
    """Measure all servers on each set of bodies with each number of clients, print a table and write the report to
    `out`. Returns whether our servers answered with the same tokens."""
    refuse_unwritable(out)
    rows: list[Row] = []
    with counted(len(loads) * sum(map(len, sets.values()))) as advance:
        for (name, bodies), clients in product(sets.items(), loads):
            rows += ({"set": name, **row} for row in measured(entrants, bodies, clients, advance))
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


def measured(entrants: Entrants, bodies: Sequence[Json], clients: int, advance: Callable[[int], None]) -> list[Row]:
    """Let all servers answer in turn, and return a row of figures for each. A single client sends one request in a
    turn."""
    with entrants.clients() as asking:
        runs = in_turn(batches_of(bodies, clients), sending_to(asking, bodies[0], clients), advance)
    rows: list[Row] = [
        {"server": name, "clients": clients, **figures_of(mine), "mismatched_tokens": None, **ratios_of(mine, runs)}
        for name, mine in runs.items()
    ]
    for row in rows[: len(entrants.ours)]:
        spent = asking[row["server"]].spent / row["total_output_tokens"]
        row |= zip(("context_switches_per_token", "cpu_seconds_per_token"), spent.tolist(), strict=True)
        row["mismatched_tokens"] = mismatches(runs[rows[0]["server"]], runs[row["server"]])
    return rows


def batches_of(bodies: Sequence[Json], clients: int) -> list[Sequence[Json]]:
    """Return the requests of each turn."""
    size = _ROUNDS * clients if clients > 1 else 1
    return [bodies[first : first + size] for first in range(0, len(bodies), size)]


def sending_to(
    asking: Mapping[str, HttpClient], body: Json, clients: int
) -> dict[str, Callable[[Sequence[Json]], Run]]:
    """Send each server a greeting with the fields of this body, which is not measured. Returns what sends requests to
    each."""
    for client in asking.values():
        client.send([{name: _GREETING.get(name, value) for name, value in body.items()}], 1)
        client.spent = np.zeros(2)
    return {name: partial(client.send, num_clients=clients) for name, client in asking.items()}


def ratios_of(mine: Sequence[Run], runs: Mapping[str, Sequence[Run]]) -> Row:
    """Compute a server's speed-ups over the first server; those of decoding only if each turn has a single answer."""
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
