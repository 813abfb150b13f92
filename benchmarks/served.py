"""`python -m benchmarks served`: what HTTP and a process of its own cost, plain and adaptive.

Engines in this process and servers of the same settings answer the same prompts in turn, as token ids and without a
prefix cache. For each row all of them are new, so that none has seen the prompts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Annotated

import typer

from service.assembly import Assembly
from service.bench.commands import AnswerTokens, Limit, MorePromptFiles, Out, PromptFiles, Seed, Temperatures, numbers
from service.bench.driver import Run, generate
from service.bench.experiment import (
    PLAIN,
    Column,
    Contestant,
    Measure,
    Row,
    conclude,
    counted,
    mismatches,
    plain_engine,
    prepare,
    rate_ratio,
    read_sets,
    shown,
    speed_ratio,
    table_of,
    take_turns,
    tokens_per_second,
    warm_up,
)
from service.bench.serve import Entrants
from service.bench.servers import HttpClient
from service.config import LoadedConfig
from service.engine.requests import GenerationRequest

AGAIN, ADAPTIVE = "plain again", "adaptive"
SERVED_PLAIN, SERVED_ADAPTIVE = "served plain", "served adaptive"
_PAIRS = ((SERVED_PLAIN, PLAIN), (SERVED_ADAPTIVE, ADAPTIVE), (SERVED_ADAPTIVE, SERVED_PLAIN), (AGAIN, PLAIN))
_OFF = {"prefix_cache": "off"}  # engines that share slots keep none either
_WARM_UP_TOKENS = 8
_SAMPLING = ("seed", "max_tokens", "temperature", "ignore_eos")


@contextmanager
def contestants_of(assembly: Assembly, *, stream: bool) -> Iterator[dict[str, Contestant]]:
    """Start servers, and yield them beside engines on the loaded target."""
    ours = {SERVED_PLAIN: {"drafter": "none", **_OFF}, SERVED_ADAPTIVE: _OFF}
    engines = {PLAIN: plain_engine(assembly), AGAIN: plain_engine(assembly), ADAPTIVE: assembly.engine()}
    with Entrants(assembly.config, ours, {}, "none", stream).clients() as clients:
        sending = {name: partial(_sent, client) for name, client in clients.items()}
        yield {**{name: partial(generate, engine) for name, engine in engines.items()}, **sending}


def _sent(client: HttpClient, requests: Sequence[GenerationRequest]) -> Run:
    """Send all requests at once, with their prompts as token ids."""
    sampling = [{name: getattr(request.sampling, name) for name in _SAMPLING} for request in requests]
    bodies = [{"prompt": [*request.prompt], **how} for request, how in zip(requests, sampling, strict=True)]
    return client.send(bodies, len(bodies))


def row_of(what: Row, runs: Mapping[str, Sequence[Run]]) -> Row:
    """Return the figures of all contestants. `decode` is from the first token of an answer to its last; whole answers
    have none."""
    decoded = {name: [run.decoded for run in mine] for name, mine in runs.items()}
    seconds = {name: sum(spent for _, spent in mine) for name, mine in decoded.items()}
    return {
        **what,
        "turns": len(runs[PLAIN]),
        "tokens": sum(run.num_tokens for run in runs[PLAIN]),
        "tokens_per_second": {name: tokens_per_second(mine) for name, mine in runs.items()},
        "decode_tokens_per_second": {
            name: sum(count for count, _ in mine) / seconds[name] for name, mine in decoded.items() if seconds[name]
        },
        "ratios": {f"{a} over {b}": speed_ratio(runs[a], runs[b]) for a, b in _PAIRS},
        "decode_ratios": {
            f"{a} over {b}": rate_ratio(decoded[a], decoded[b]) for a, b in _PAIRS if seconds[a] and seconds[b]
        },
        "mismatched_tokens": sum(mismatches(runs[PLAIN], mine) for mine in runs.values()),
    }


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    limit: Limit = None,
    temperature: Temperatures = [0.0],  # noqa: B006  # read as a signature, never changed
    max_tokens: AnswerTokens = 128,
    concurrency: Annotated[str, typer.Option(metavar="N,...", help="Requests in flight.")] = "1",
    stream: Annotated[bool, typer.Option(help="Ask for streams.")] = True,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare servers with engines in this process, on the same prompts in turn. Exit code 1 if any token differs."""
    assembly = prepare(loaded.config, out)
    sets = read_sets(assembly, [*prompts, *(more_prompts or [])], limit, max_tokens)
    measures = [
        Measure(value, max_tokens, clients, seed)
        for value, clients in product(dict.fromkeys(temperature), numbers(concurrency))
    ]
    rows: list[Row] = []
    with counted(len(measures) * sum(len(one.prompts) for one in sets), "prompts") as advance:
        for one, measure in product(sets, measures):
            with contestants_of(assembly, stream=stream) as contestants:
                warm_up(contestants, one.prompts[0][:_WARM_UP_TOKENS], measure)
                runs = take_turns(one.prompts, contestants, measure, advance)
            what = {"set": one.name, "temperature": measure.temperature, "concurrency": measure.concurrency}
            rows.append(row_of({**what, "stream": stream}, runs))
    summary = {"mismatched_tokens": sum(row["mismatched_tokens"] for row in rows)}
    return conclude(assembly, out, rows, summary, table_of(_COLUMNS, rows, caption=_CAPTION))


def _ratio(kind: str, a: str, b: str, row: Row) -> str:
    ratio = row[kind].get(f"{a} over {b}")
    return "" if ratio is None else shown(ratio)


def _speed(name: str, row: Row) -> str:
    return f"{row['tokens_per_second'][name]:.1f}"


_COLUMNS: tuple[Column, ...] = (
    ("set", lambda row: f"{row['set']}, T = {row['temperature']:g}, {row['concurrency']} at a time"),
    *((name, partial(_speed, name)) for name in (PLAIN, SERVED_PLAIN, ADAPTIVE, SERVED_ADAPTIVE)),
    *((f"{a} / {b}", partial(_ratio, "ratios", a, b)) for a, b in _PAIRS),
    *((f"{a} / {b}, decode", partial(_ratio, "decode_ratios", a, b)) for a, b in _PAIRS[:3]),
    ("mismatched", lambda row: str(row["mismatched_tokens"])),
)
_CAPTION = "tokens per second, prompts included; decode: from the first token of an answer to its last"
