"""`python -m benchmarks poison`: what hostile clients can do to honest ones through the drafter that learns.

Three runs answer the same honest queries: `attacked` learns with hostile queries in between, `unattacked` without them,
and `anchor` never learns. Only the answers of honest clients are compared.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from benchmarks.policies import PolicyName
from benchmarks.shared import LongestAnswer, Prompt, mixed
from benchmarks.shift import TurnQueries, columns_table, draw, event_row, learning_cells, rows_of
from benchmarks.shift_play import (
    PLAIN,
    Phase,
    Played,
    Stream,
    Turn,
    joined,
    play_all,
    players_of,
    turns_of,
    windows_of,
)
from service.assembly import Assembly
from service.bench.commands import Concurrency, MorePromptFiles, Out, Seed, Temperature
from service.bench.driver import Run
from service.bench.experiment import (
    Interval,
    Measure,
    Row,
    conclude,
    mismatches,
    prepare,
    rate_ratio,
    read_sets,
    request_of,
    shown,
    tau,
)
from service.config import LoadedConfig
from service.engine.requests import GenerationRequest, Scope
from service.errors import StartupError
from service.text.prompts import refuse_too_long
from service.text.tokenizer import ChatTokenizer

ATTACKED, UNATTACKED, ANCHOR = RUNS = ("attacked", "unattacked", "anchor")
GARBAGE, NARROW, STEALTH = HOSTILE = ("garbage", "narrow", "stealth")
ASKED_RATIO = 0.97

Content = Literal["garbage", "narrow", "honest"]

_BURST_SHARE = 0.75  # of the stealthy client's queries
_BURST_FROM, _BURST_TO = 0.5, 0.75  # of the stream: six times its rate in the first half
_LENGTHS = 8, 64  # of garbage, in tokens or characters
_CHARACTERS = 0x21, 0x250  # printable ASCII, and letters that few languages use
_STRETCH = 3  # windows
_FORMATS = (
    "Write the digits of {number} in Morse code, ten times, one line each. No words.",
    "Write a CSV table of ten rows: n, n squared, n cubed. Begin with n = {number}. No words.",
    "Write ten numbers in binary and in hexadecimal, one line each. Begin with {number}. No words.",
)


@dataclass(frozen=True, slots=True)
class Visit:
    """One query of a hostile client."""

    at: float  # in honest queries: 7.5 is between number 7 and number 8
    client: str
    content: Content


def visits_of(queries: int, share: float, rng: random.Random) -> list[Visit]:
    """Return hostile queries that make up this share of all, in the order of their places."""
    total = round(queries * share / (1 - share))
    garbage, narrow, stealth = (total // 3 + (index < total % 3) for index in range(3))
    burst = round(_BURST_SHARE * stealth)
    half, end = _BURST_FROM * queries, _BURST_TO * queries
    parts: tuple[tuple[str, Content, int, float, float], ...] = (
        (GARBAGE, "garbage", garbage, 0, queries),
        (NARROW, "narrow", narrow, 0, queries),
        (STEALTH, "honest", stealth - burst, 0, half),
        (STEALTH, "garbage", burst, half, end),
    )
    visits = [
        Visit(first + (number + rng.random()) * (last - first) / count, client, content)
        for client, content, count, first, last in parts
        for number in range(count)
    ]
    return sorted(visits, key=lambda visit: visit.at)


def garbage_prompts(tokenizer: ChatTokenizer, vocab_size: int, rng: random.Random) -> Iterator[Prompt]:
    """Yield random token ids, and messages of random characters, without end."""
    while True:
        yield tuple(rng.randrange(vocab_size) for _ in range(rng.randint(*_LENGTHS)))
        yield _message(tokenizer, "".join(chr(rng.randrange(*_CHARACTERS)) for _ in range(rng.randint(*_LENGTHS))))


def narrow_prompts(tokenizer: ChatTokenizer, rng: random.Random) -> Iterator[Prompt]:
    """Yield questions for columns of digits in one of a few formats, without end."""
    while True:
        yield _message(tokenizer, rng.choice(_FORMATS).format(number=rng.randrange(100, 100_000)))


def _message(tokenizer: ChatTokenizer, text: str) -> Prompt:
    return tuple(tokenizer.render_chat([{"role": "user", "content": text}]))


def honest_stream(prompts: Sequence[Prompt]) -> Stream:
    """Return honest prompts in phases that end where the attack changes, without empty phases."""
    burst, after = (round(share * len(prompts)) for share in (_BURST_FROM, _BURST_TO))
    pieces = {"before": prompts[:burst], "burst": prompts[burst:after], "after": prompts[after:]}
    return Stream(tuple(Phase(name, tuple(piece)) for name, piece in pieces.items() if piece), new_from=0)


def honest_turns(stream: Stream, size: int, clients: int, measure: Measure, rng: random.Random) -> list[Turn]:
    """Return the stream in turns of `size` queries, each query from a random client."""

    def owned(request: GenerationRequest) -> GenerationRequest:
        return replace(request, scope=Scope(address=f"honest {rng.randrange(clients) + 1}"))

    return [replace(turn, requests=tuple(map(owned, turn.requests))) for turn in turns_of(stream, size, measure)]


def attacked(
    turns: Sequence[Turn], visits: Sequence[Visit], prompts: Mapping[Content, Iterator[Prompt]], measure: Measure
) -> list[Turn]:
    """Return the same turns with hostile queries at their places, numbered after all honest ones."""
    first = sum(len(turn.requests) for turn in turns)
    hostile = [
        (visit.at, request_of(number, next(prompts[visit.content]), measure, client=visit.client, ignore_eos=False))
        for number, visit in enumerate(visits, start=first)
    ]
    found = []
    for turn in turns:
        honest = [(float(number), request) for number, request in enumerate(turn.requests, start=turn.first)]
        visitors = [one for one in hostile if turn.first <= one[0] < turn.first + len(turn.requests)]
        in_order = sorted([*honest, *visitors], key=lambda placed: placed[0])
        found.append(replace(turn, requests=tuple(request for _, request in in_order)))
    return found


def answers_of(played: Played, clients: Callable[[str], bool]) -> Run:
    """Return the answers to some clients."""
    pairs = zip(played.turn.requests, played.run.answers, strict=True)
    return replace(played.run, answers=tuple(answer for asked, answer in pairs if clients(asked.scope.address)))


def honest_part(played: Sequence[Played], turns: Sequence[Turn]) -> list[Played]:
    """Return what a run did for honest clients; events are counted by honest queries too."""
    parts, answered = [], 0
    for mine, turn in zip(played, turns, strict=True):
        honest = [asked.scope.address not in HOSTILE for asked in mine.turn.requests]
        run = answers_of(mine, lambda client: client not in HOSTILE)
        noted = tuple(
            replace(one, query=turn.first + sum(honest[: max(0, one.query - answered)])) for one in mine.noted
        )
        parts.append(replace(mine, turn=turn, run=run, noted=noted))
        answered += len(honest)
    return parts


def summary_of(played: Sequence[Played], anchor: Sequence[Played], stream: Stream, *, seed: int) -> Row:
    """Compare the honest part of a run with the anchor's."""
    whole = joined(played)
    phases = enumerate(stream.phases)
    return {
        "tau": whole.tau,
        "tau_by_phase": {one.name: tau(turn.run for turn in played if turn.turn.phase == at) for at, one in phases},
        "over_anchor": tau_ratio(played, anchor, seed=seed),
        "worst_three_windows": worst_stretch(windows_of(played), windows_of(anchor)),
        "mismatched_tokens": mismatches([turn.run for turn in anchor], [turn.run for turn in played]),
        **whole.counts,
        "events": [event_row(noted) for noted in whole.noted],
    }


def tau_ratio(mine: Sequence[Played], others: Sequence[Played], *, seed: int) -> Interval:
    """Return the ratio of two runs' tau on the same queries, with its interval."""
    return rate_ratio(*([_emitted(one) for one in turns] for turns in (mine, others)), seed=seed)


def _emitted(played: Played) -> tuple[float, float]:
    """Return emitted tokens and verifies."""
    accepted = [count for answer in played.run.answers for count in answer.accepted_per_step]
    return len(accepted) + sum(accepted), len(accepted)


def worst_stretch(mine: Sequence[Played], anchor: Sequence[Played]) -> Row:
    """Return the lowest tau over the anchor's of every three consecutive windows, or of all where there are fewer."""
    length = min(_STRETCH, len(mine))
    stretches = []
    for start in range(len(mine) - length + 1):
        ours, theirs = (joined(windows[start : start + length]).tau for windows in (mine, anchor))
        stretches.append(
            {"first_query": mine[start].turn.first, "tau": ours, "anchor_tau": theirs, "ratio": ours / theirs}
        )
    return min(stretches, key=lambda stretch: stretch["ratio"])


def hostile_of(played: Sequence[Played]) -> dict[str, Row]:
    """Return what each hostile client received, without clients that sent nothing."""
    found = {}
    for client in HOSTILE:
        runs = [answers_of(turn, client.__eq__) for turn in played]
        queries = sum(len(run.answers) for run in runs)
        if queries:
            found[client] = {"queries": queries, "tokens": sum(run.num_tokens for run in runs), "tau": tau(runs)}
    return found


def totals_of(summaries: Mapping[str, Row], hostile: Mapping[str, Row], queries: int) -> Row:
    """Return what the report's summary takes from all runs."""
    num_hostile = sum(client["queries"] for client in hostile.values())
    return {
        "hostile_queries": num_hostile,
        "hostile_share": num_hostile / (num_hostile + queries),
        "asked_ratio": ASKED_RATIO,
        "worst_three_windows": summaries[ATTACKED]["worst_three_windows"],
        "over_share": summaries[ATTACKED]["over_share"],
        "mismatched_tokens": sum(one["mismatched_tokens"] for one in summaries.values()),
        "runs": summaries,
        "hostile": hostile,
    }


def run(
    loaded: LoadedConfig,
    honest: Annotated[list[Path], typer.Option(metavar="FILE...", help="JSONL files with honest clients' prompts.")],
    more_honest: MorePromptFiles = None,
    narrow: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Prompts of the narrow client. Unset: built-in ones.")
    ] = None,
    queries: Annotated[int, typer.Option(min=8, help="Queries of honest clients, in all.")] = 300,
    share: Annotated[float, typer.Option(min=0, max=0.9, help="Share of all queries that hostile clients send.")] = 0.3,
    honest_clients: Annotated[int, typer.Option(min=1, help="Honest clients.")] = 7,
    temperature: Temperature = 0.0,
    max_tokens: LongestAnswer = 64,
    concurrency: Concurrency = 1,
    turn_queries: TurnQueries = 5,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Measure what hostile clients do to honest ones through the drafter that learns, with a picture next to --out.
    Exit code 1 if any token of an honest client differs."""
    learning = loaded.config.adaptation.policy
    if learning == PLAIN:
        raise StartupError(f"--adaptation.policy {PLAIN} learns nothing that could be poisoned: choose another one")
    policies: dict[str, PolicyName] = {ATTACKED: learning, UNATTACKED: learning, ANCHOR: PLAIN}
    measure, rng = Measure(temperature, max_tokens, concurrency, seed), random.Random(seed)
    assembly = prepare(loaded.config, out)
    visits = visits_of(queries, share, rng)
    lent = sum(visit.content == "honest" for visit in visits)
    prompts = mixed(read_sets(assembly, [*honest, *(more_honest or [])], None, max_tokens), queries + lent, rng)
    stream = honest_stream(prompts[:queries])
    turns = honest_turns(stream, turn_queries, honest_clients, measure, rng)
    contents: dict[Content, Iterator[Prompt]] = {
        "honest": iter(prompts[queries:]),
        "garbage": garbage_prompts(assembly.tokenizer, assembly.target.vocab_size, rng),
        "narrow": _narrow(assembly, narrow or [], max_tokens, rng),
    }
    poisoned = attacked(turns, visits, contents, measure)
    everything = [request.prompt for turn in poisoned for request in turn.requests]
    refuse_too_long(everything, max_tokens, assembly.limits.max_model_len, "hostile prompts")
    with players_of(assembly, policies, seed) as players:
        played = play_all(players, {ATTACKED: poisoned, UNATTACKED: turns, ANCHOR: turns}, measure)
    mine = {name: honest_part(played[name], turns) for name in RUNS}
    windows = {name: windows_of(parts) for name, parts in mine.items()}
    if out is not None:
        draw(out.with_suffix(".png"), windows, stream)
    summaries = {name: summary_of(parts, mine[ANCHOR], stream, seed=seed) for name, parts in mine.items()}
    hostile = hostile_of(played[ATTACKED])
    summary = {
        "queries": queries,
        "honest_clients": honest_clients,
        "ratio": tau_ratio(mine[ATTACKED], mine[UNATTACKED], seed=seed),
        **totals_of(summaries, hostile, queries),
    }
    rows = [row for name in RUNS for row in _rows(name, windows[name], played[name], stream)]
    return conclude(assembly, out, rows, summary, _table(summary))


def _rows(name: str, windows: Sequence[Played], played: Sequence[Played], stream: Stream) -> list[Row]:
    came = Counter(one.turn.window for one in played for asked in one.turn.requests if asked.scope.address in HOSTILE)
    return [{"run": name, **row, "hostile_queries": came[row["window"]]} for row in rows_of(windows, stream)]


def _narrow(assembly: Assembly, files: Sequence[Path], max_tokens: int, rng: random.Random) -> Iterator[Prompt]:
    if not files:
        return narrow_prompts(assembly.tokenizer, rng)
    return cycle(prompt for chosen in read_sets(assembly, files, None, max_tokens) for prompt in chosen.prompts)


def _table(summary: Row) -> Table:
    ends = ("mismatched", "its query", "over share")
    table = columns_table({name: _cells(one) for name, one in summary["runs"].items()}, ends)
    hostile = ", ".join(
        f"{name} {client['queries']} queries, tau {client['tau']:.2f}" for name, client in summary["hostile"].items()
    )
    table.caption = (
        f"honest clients; {ATTACKED} / {UNATTACKED}: {shown(summary['ratio'])}, asked for are {ASKED_RATIO}, with 95 % "
        f"intervals; worst: the lowest of every {_STRETCH} windows over the {ANCHOR}'s, and its first honest query; "
        f"hostile: {hostile or 'none'}"
    )
    return table


def _cells(summary: Row) -> dict[str, object]:
    worst = summary["worst_three_windows"]
    return {
        "mismatched": summary["mismatched_tokens"],
        "tau": f"{summary['tau']:.3f}",
        **{f"tau {phase}": f"{value:.3f}" for phase, value in summary["tau_by_phase"].items()},
        f"tau / {ANCHOR}": shown(summary["over_anchor"]).replace(" ", "\n", 1),
        "worst": f"{worst['ratio']:.3f}",
        "its query": worst["first_query"],
        **learning_cells(summary),
        "over share": summary["over_share"],
        "training": f"{summary['training_seconds']:.1f} s",
    }
