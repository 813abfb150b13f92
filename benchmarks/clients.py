"""`python -m benchmarks clients`: the same streams, sent by several clients and by one.

A stream is a closed loop: it sends its next request as soon as the last one is answered. Three engines serve the same
streams in turns of two seconds: from several clients, from one client, and from one client again, whose ratio to the
other shows how far chance moves equal contestants. Measuring starts when every contestant has answered as many requests
as there are streams.
"""

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import Annotated

import typer

from benchmarks.load import answer_lengths, engines_of
from benchmarks.shared import in_one_line, percentile
from service.bench.commands import AnswerTokens, MorePromptFiles, Out, PromptFiles, Seed, Temperatures
from service.bench.driver import Answer, ClosedLoop, Drive, Span
from service.bench.experiment import (
    Column,
    Measure,
    Row,
    conclude,
    count_mismatches,
    counted,
    prepare,
    read_sets,
    request_of,
    rotated,
    shown,
    speed_ratio,
    table_of,
)
from service.config import LoadedConfig
from service.engine.engine import Engine, EngineOutput
from service.engine.requests import GenerationRequest
from service.engine.waiting import PROMPT_SHARE
from service.errors import StartupError
from service.text.prompts import PromptSet

SEVERAL, ONE, AGAIN = "clients", "one_client", "one_client_again"

LONG = "long"
SLICE_SECONDS = 2.0  # of a turn
_LONG_TOKENS = 4_000
"""Length of a long prompt: 16 chunks of the default `prefill_chunk`."""


@dataclass(frozen=True, slots=True)
class Client:
    """One client of a mix, with so many requests in flight."""

    streams: int
    source: str  # name of its prompts
    prompts: Sequence[Sequence[int]]
    measure: Measure


def mixes_of(text: str) -> dict[str, list[str]]:
    """Parse mixes such as 12x1,1+11,long+8; return the streams of each client, a number or `long`, by mix. Raises
    StartupError."""
    mixes: dict[str, list[str]] = {}
    for name in filter(None, map(str.strip, text.split(","))):
        found = [re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*|long)", part) for part in name.split("+")]
        mixes[name] = [part[2] for part in found if part for _ in range(int(part[1] or 1))]
        if not all(found):
            raise StartupError(f"--mixes: {name!r} is no mix such as 12x1, 1+11, 3x4+1 or long+8")
    if not mixes:
        raise StartupError("--mixes names no mix: give for example 12x1,1+11,long+8")
    return mixes


def clients_of(
    mix: Sequence[str], sets: Sequence[PromptSet], measures: Sequence[Measure], *, long_tokens: int
) -> list[Client]:
    """Return the clients of a mix; prompt sets and measures go to them in turn."""
    clients = []
    for number, streams in enumerate(mix):
        mine, measure = sets[number % len(sets)], measures[number % len(measures)]
        if streams == LONG:
            name = f"{mine.name}, {long_tokens} tokens each"
            clients.append(Client(1, name, long_prompts(mine.prompts, long_tokens), measure))
        else:
            clients.append(Client(int(streams), mine.name, mine.prompts, measure))
    return clients


def long_prompts(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[tuple[int, ...]]:
    """Return a prompt of `num_tokens` tokens for each prompt: that one, followed by the next ones."""
    ring = [[*prompts[first:], *prompts[:first]] for first in range(len(prompts))]
    return [tuple(islice(chain.from_iterable(cycle(order)), num_tokens)) for order in ring]


class Streams:
    """The streams of a mix on one engine, and what each client received since `start_measuring`."""

    def __init__(self, engine: Engine, clients: Sequence[Client], *, as_one: bool) -> None:
        self._engine = engine
        self._clients = clients
        self._as_one = as_one
        self._owners = [owner for owner, client in enumerate(clients) for _ in range(client.streams)]
        self._requests = [self._request(number) for number in range(len(self._owners))]
        self._unread = {one.request_id: len(one.prompt) for one in self._requests}  # prompt tokens not counted yet
        # The driver sends requests in the order of this list: when one ends, the next one of its stream.
        self.drive = Drive(engine, self._requests, ClosedLoop(len(self._owners)), after_step=self._after_step)
        self.start_measuring()

    @property
    def is_steady(self) -> bool:
        """Whether as many requests have ended as there are streams."""
        return self.drive.num_finished >= len(self._owners)

    def start_measuring(self) -> None:
        """Count from now on."""
        self._first_measured = len(self._requests)
        self.tokens: Counter[int] = Counter()  # generated, by client
        self.served: defaultdict[int, float] = defaultdict(float)  # tokens, weighted as the scheduler does
        self._running: Counter[int] = Counter()  # sequences, added up over the steps
        self._waiting: Counter[int] = Counter()

    def take_turn(self, seconds: float) -> Span:
        """Serve for so many seconds; return steady seconds and tokens."""
        before = self.drive.result().steady
        self.drive.go_on(seconds)
        after = self.drive.result().steady
        return Span(after.seconds - before.seconds, after.tokens - before.tokens)

    def answers(self) -> dict[str, tuple[int, ...]]:
        """Return the tokens of each complete answer by request id."""
        return {name: answer.token_ids for name, answer in self._sent() if answer.finish_reason is not None}

    def figures(self, client: int, seconds: float) -> Row:
        """Return speed and latencies of a client; latencies of requests that were sent while measuring."""
        sent = islice(self._sent(), self._first_measured, None)
        mine = [answer for name, answer in sent if answer.token_ids and self._owner(name) == client]
        firsts = [answer.first_token_seconds for answer in mine]
        gaps = [gap for answer in mine for gap in answer.gaps_seconds]
        return {
            "requests": len(mine),
            "tokens": self.tokens[client],
            "tokens_per_second": self.tokens[client] / seconds,
            **{f"ttft_p{percent}_seconds": percentile(firsts, percent) if firsts else None for percent in (50, 95)},
            **{f"itl_p{percent}_seconds": percentile(gaps, percent) if gaps else None for percent in (50, 95)},
        }

    def _sent(self) -> Iterator[tuple[str, Answer]]:
        """Yield request ids with their answers in the order of sending."""
        answers = self.drive.result().answers
        return ((asked.request_id, answer) for asked, answer in zip(self._requests, answers, strict=False))

    def demand(self, client: int) -> float:
        """Return an upper bound of the tokens that a client could have used: those it received, times its sequences
        over those that ran. Infinite where none ran."""
        running, waiting = self._running[client], self._waiting[client]
        return self.served[client] * (running + waiting) / running if running else math.inf

    def _request(self, number: int) -> GenerationRequest:
        """Return request `number` of stream `number % streams`; its number determines prompt and length."""
        owner = self._owners[number % len(self._owners)]
        client = self._clients[owner]
        rng = random.Random(f"{client.measure.seed} {number}")
        length = rng.randint(*answer_lengths(client.measure.max_tokens))
        name = "" if self._as_one else str(owner)
        return request_of(number, rng.choice(client.prompts), replace(client.measure, max_tokens=length), client=name)

    def _owner(self, request_id: str) -> int:
        return self._owners[int(request_id) % len(self._owners)]

    def _after_step(self, report: EngineOutput) -> None:
        """Count tokens and sequences by client, and append the next request of each answered stream."""
        waiting = Counter(self._owners)  # a stream has one request at a time
        for output in report.outputs:
            owner = self._owner(output.request_id)
            if output.token_ids:
                read = self._unread.pop(output.request_id, 0)
                self.tokens[owner] += len(output.token_ids)
                self.served[owner] += len(output.token_ids) + PROMPT_SHARE * read
            if output.finish_reason is not None:
                waiting[owner] -= 1
                following = self._request(int(output.request_id) + len(self._owners))
                self._requests.append(following)
                self._unread[following.request_id] = len(following.prompt)
        running = Counter(self._owner(sequence.request.request_id) for sequence in self._engine.scheduler.running)
        self._running.update(running)
        self._waiting.update(waiting - running)


def fair_shares(demands: Sequence[float], total: float) -> list[float]:
    """Return max-min shares of `total`: a client that demands less than an equal share gets its demand."""
    shares, left = [0.0] * len(demands), total
    for done, client in enumerate(sorted(range(len(demands)), key=demands.__getitem__)):
        shares[client] = min(demands[client], left / (len(demands) - done))
        left -= shares[client]
    return shares


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    mixes: Annotated[
        str,
        typer.Option(
            metavar="MIX,...",
            help="12x1: twelve clients of one stream each; 1+11: two clients; long+8: one prompt of 4,000 tokens at a "
            "time, and a client with eight streams. Prompt files and temperatures go to the clients in turn.",
        ),
    ] = "12x1,1+11,long+1",
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each of three contestants serves each mix.")] = 60.0,
    temperature: Temperatures = [0.0],  # noqa: B006  # read as a signature, never changed
    max_tokens: AnswerTokens = 64,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare streams of several clients with the same streams of one. Exit code 1 if any token differs."""
    named, measures = mixes_of(mixes), [Measure(one, max_tokens, 1, seed) for one in temperature]
    assembly = prepare(loaded.config, out)
    most = answer_lengths(max_tokens)[1]
    sets = read_sets(assembly, [*prompts, *(more_prompts or [])], None, most)
    long_tokens = min(_LONG_TOKENS, assembly.limits.max_model_len - most)
    turns = max(2, round(seconds / SLICE_SECONDS))
    rows: list[Row] = []
    with counted(3 * turns * len(named)) as advance:
        for name, mix in named.items():
            advance(0, name)
            clients = clients_of(mix, sets, measures, long_tokens=long_tokens)
            longest = max(len(prompt) for client in clients for prompt in client.prompts) + most
            engines = engines_of(assembly, dict.fromkeys((SEVERAL, ONE, AGAIN)), longest, 1)
            played = {key: Streams(engine, clients, as_one=key != SEVERAL) for key, engine in engines.items()}
            spans = play(played, turns, advance)
            shape = {"mix": name, "max_sequences": assembly.limits.max_sequences}
            rows.append({**shape, **row_of(clients, played, spans)})
    summary = {
        "lowest_over_one_client": min(row["over_one_client"][0] for row in rows),
        "largest_shortfall": max(row["largest_shortfall"] for row in rows),
        "mismatched_tokens": sum(row["mismatched_tokens"] for row in rows),
    }
    lines = [{**row, **client} for row in rows for client in row["clients"]]
    table = table_of(_COLUMNS, lines, caption=_CAPTION, section=lambda row: row["mix"])
    return conclude(assembly, out, rows, summary, table, *map(_line, rows), in_one_line(summary))


def play(played: Mapping[str, Streams], turns: int, advance: Callable[[int], None]) -> dict[str, list[Span]]:
    """Let the contestants take turns; return the measured turns of each."""
    order, warm_up = list(played), 0
    while not all(streams.is_steady for streams in played.values()):
        for name in rotated(order, warm_up):
            played[name].take_turn(SLICE_SECONDS)
        warm_up += 1
    for streams in played.values():
        streams.start_measuring()
    spans: dict[str, list[Span]] = {name: [] for name in played}
    for turn in range(turns):
        for name in rotated(order, turn):
            spans[name].append(played[name].take_turn(SLICE_SECONDS))
            advance(1)
    return spans


def row_of(clients: Sequence[Client], played: Mapping[str, Streams], spans: Mapping[str, Sequence[Span]]) -> Row:
    """Return the figures of a mix: of each client, and of all together against the same streams of one client."""
    several, one = played[SEVERAL], played[ONE]
    seconds = {key: sum(span.seconds for span in mine) for key, mine in spans.items()}
    answers = {key: streams.answers() for key, streams in played.items()}
    served = [several.served[place] for place in range(len(clients))]
    shares = fair_shares([several.demand(place) for place in range(len(clients))], sum(served))
    lines = [
        {
            "client": place,
            "streams": client.streams,
            "prompts": client.source,
            "temperature": client.measure.temperature,
            **several.figures(place, seconds[SEVERAL]),
            "served": served[place],
            "fair_share": shares[place],
            "shortfall": max(0.0, 1 - served[place] / shares[place]) if shares[place] else 0.0,
            "under_one_client": one.figures(place, seconds[ONE]),
        }
        for place, client in enumerate(clients)
    ]
    return {
        "turns": len(spans[SEVERAL]),
        "seconds": seconds,
        "tokens_per_second": {key: sum(span.tokens for span in mine) / seconds[key] for key, mine in spans.items()},
        "over_one_client": speed_ratio(spans[SEVERAL], spans[ONE]),
        "one_client_over_itself": speed_ratio(spans[AGAIN], spans[ONE]),
        "largest_shortfall": max(line["shortfall"] for line in lines),
        "clients": lines,
        "mismatched_tokens": sum(
            count_mismatches(answers[ONE][key], tokens)
            for others in (SEVERAL, AGAIN)
            for key, tokens in answers[others].items()
            if key in answers[ONE]
        ),
    }


def _line(row: Row) -> str:
    speed = row["tokens_per_second"]
    return (
        f"{row['mix']}: {speed[SEVERAL]:.1f} tokens/s, {shown(row['over_one_client'])} of one client's "
        f"{speed[ONE]:.1f}; one client over itself {shown(row['one_client_over_itself'])}; largest shortfall "
        f"{100 * row['largest_shortfall']:.1f} %"
    )


def _both(key: str, scale: float, form: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        values = (row[key], row["under_one_client"][key])
        return "{} ({})".format(*("-" if value is None else f"{scale * value:{form}}" for value in values))

    return cell


_COLUMNS: tuple[Column, ...] = (
    ("mix", lambda row: row["mix"]),
    ("client", lambda row: f"{row['client']}: {row['streams']} of {row['prompts']}, T {row['temperature']:g}"),
    ("tokens/s", _both("tokens_per_second", 1, ".1f")),
    ("TTFT p50", _both("ttft_p50_seconds", 1, ".2f")),
    ("p95", _both("ttft_p95_seconds", 1, ".2f")),
    ("ITL p50", _both("itl_p50_seconds", 1000, ".0f")),
    ("p95", _both("itl_p95_seconds", 1000, ".0f")),
    ("share", lambda row: f"{100 * (1 - row['shortfall']):.1f} %"),
)
_CAPTION = (
    "client: its streams, their prompts and temperature; in brackets: the same streams from one client; TTFT: seconds "
    "to the first token; ITL: milliseconds per further token; share: tokens received, prompts at the scheduler's "
    "weight, over the max-min share of all tokens"
)
