"""Requests of two kinds by turns, which gain differently by drafting: what sharing an engine costs each of them.

One at a time: the same requests on an engine that serves both kinds, and on one for each kind. Together: an engine that
decides for itself beside one whose texts all draft and one that decodes plainly. Started again: an engine that begins
with what the first one had learnt, beside that one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer

from service.bench.clients import ratio_of
from service.bench.commands import AnswerTokens, Concurrency, MorePromptFiles, Out, PromptFiles, Seed, Temperatures
from service.bench.driver import ClosedLoop, Drive, Run, Span, generate
from service.bench.experiment import (
    PLAIN,
    Column,
    Measure,
    Row,
    conclude,
    counted,
    mismatches,
    prepare,
    read_sets,
    request_of,
    rotated,
    table_of,
)
from service.bench.load import ADAPTIVE, SLICE_SECONDS, engines_of
from service.config import LoadedConfig
from service.engine.budget import FixedBudget
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest
from service.errors import StartupError

BOTH, ALONE, ALONE_AGAIN, LEARNT, AGAIN = "both kinds", "alone", "alone again", "learnt", "started again"
DRAFTS = "fixed:4"
"""All texts draft: the fixed budget that is the fastest with several requests."""
KINDS = (0, 1)

Pairs = Sequence[Sequence[GenerationRequest]]
"""Turns: a request of each kind."""


def pairs_of(texts: Sequence[Sequence[Sequence[int]]], measures: Sequence[Measure], count: int) -> Pairs:
    """So many turns, each with the next prompt of either set, at that set's temperature."""
    return [
        [request_of(2 * turn + kind, texts[kind][turn % len(texts[kind])], measures[kind]) for kind in KINDS]
        for turn in range(count)
    ]


def one_at_a_time(
    engines: Mapping[str, Sequence[Engine]], pairs: Pairs, advance: Callable[[int], None]
) -> dict[str, list[list[Run]]]:
    """Answers of every contestant, by kind and turn; each contestant has an engine for either kind."""
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in KINDS] for name in engines}
    for turn, pair in enumerate(pairs):
        for name in rotated(list(engines), turn):
            for kind in KINDS:
                runs[name][kind].append(generate(engines[name][kind], [pair[kind]]))
        advance(1)
    return runs


def together(
    engines: Mapping[str, Engine], pairs: Pairs, concurrency: int, advance: Callable[[int], None]
) -> tuple[dict[str, list[list[Span]]], dict[str, Run]]:
    """What every contestant emitted of either kind, by kind and turn, while all clients were busy; and its answers."""
    requests = [request for pair in pairs for request in pair]
    drives = {name: Drive(engine, requests, ClosedLoop(concurrency)) for name, engine in engines.items()}
    spans: dict[str, list[list[Span]]] = {name: [[] for _ in KINDS] for name in engines}
    turn = 0
    while all(drive.num_finished < len(requests) - concurrency for drive in drives.values()):
        for name in rotated(list(drives), turn):
            before = drives[name].result()
            drives[name].go_on(SLICE_SECONDS)
            after = drives[name].result()
            steps = after.steps[len(before.steps) :]
            for kind in KINDS:
                tokens = sum(count for step in steps for key, count in step.emitted.items() if int(key) % 2 == kind)
                spans[name][kind].append(Span(after.seconds - before.seconds, tokens))
        turn += 1
    for drive in drives.values():
        drive.go_on()
    advance(len(pairs))
    return spans, {name: drive.result() for name, drive in drives.items()}


def row_of(part: str, what: str, mine: Sequence[Span], others: Sequence[Span]) -> Row:
    """Tokens per second of one contestant over another's, `what` naming them and the kind."""
    speeds = [sum(span.tokens for span in spans) / sum(span.seconds for span in spans) for spans in (mine, others)]
    return {"part": part, "what": what, "tokens_per_second": speeds, "ratio": ratio_of(mine, others)}


def spans_of(runs: Sequence[Run]) -> list[Span]:
    return [Span(run.seconds, run.num_tokens) for run in runs]


def whole(kinds: Sequence[Sequence[Span]]) -> list[Span]:
    """Both kinds of every turn."""
    return [Span(first.seconds, first.tokens + second.tokens) for first, second in zip(*kinds, strict=True)]


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    temperature: Temperatures = [0.0, 1.0],  # noqa: B006  # read as a signature, never changed
    requests: Annotated[int, typer.Option(min=4, help="Requests of each kind in each part.")] = 60,
    concurrency: Concurrency = 8,
    max_tokens: AnswerTokens = 64,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Two kinds of requests by turns: what each loses by sharing an engine with the other."""
    files = [*prompts, *(more_prompts or [])]
    if len(files) != len(KINDS) or len(temperature) != len(KINDS):
        raise StartupError("give two prompt files and two temperatures, one for each kind of request")
    assembly = prepare(loaded.config, out)
    measures = [Measure(one, max_tokens, 1, seed) for one in temperature]
    sets = read_sets(assembly, files, requests, max_tokens)
    pairs = pairs_of([one.prompts for one in sets], measures, requests)
    longest = max(len(request.prompt) for pair in pairs for request in pair) + max_tokens
    adaptive = (BOTH, *(f"{name} {kind}" for name in (ALONE, ALONE_AGAIN) for kind in KINDS), AGAIN, ADAPTIVE)
    policies = {**dict.fromkeys(adaptive), DRAFTS: FixedBudget(int(DRAFTS.partition(":")[2])), PLAIN: FixedBudget(0)}
    engines = engines_of(assembly, policies, longest, concurrency)
    names = [f"{one.name} at T {heat:g}" for one, heat in zip(sets, temperature, strict=True)]

    with counted(3 * requests, "two kinds") as advance:
        contestants = {BOTH: [engines[BOTH]] * 2}
        contestants |= {name: [engines[f"{name} {kind}"] for kind in KINDS] for name in (ALONE, ALONE_AGAIN)}
        single = one_at_a_time(contestants, pairs, advance)
        engines[AGAIN].policy.restore(engines[BOTH].policy.state(), 0.0)
        started = one_at_a_time({LEARNT: [engines[BOTH]] * 2, AGAIN: [engines[AGAIN]] * 2}, pairs, advance)
        several = {name: engines[name] for name in (ADAPTIVE, DRAFTS, PLAIN)}
        spans, answers = together(several, pairs, concurrency, advance)

    rows = []
    for name in (BOTH, ALONE_AGAIN):
        for kind, title in enumerate(names):
            mine, others = spans_of(single[name][kind]), spans_of(single[ALONE][kind])
            rows.append(row_of("one at a time", f"{title}: {name} over {ALONE}", mine, others))
    for kind, title in enumerate(names):
        mine, others = spans_of(started[AGAIN][kind]), spans_of(started[LEARNT][kind])
        rows.append(row_of("second start", f"{title}: {AGAIN} over {LEARNT}", mine, others))
    part = f"{concurrency} at a time"
    for other in (DRAFTS, PLAIN):
        rows.append(row_of(part, f"both kinds: {ADAPTIVE} over {other}", whole(spans[ADAPTIVE]), whole(spans[other])))
        for kind, title in enumerate(names):
            mine, others = spans[ADAPTIVE][kind], spans[other][kind]
            rows.append(row_of(part, f"{title}: {ADAPTIVE} over {other}", mine, others))
    summary = {
        "lowest_beside_alone": min(row["ratio"][0] for row in rows[: len(KINDS)]),
        "mismatched_tokens": sum(
            mismatches(runs[ALONE][kind], runs[name][kind])
            for runs, name in ((single, BOTH), (single, ALONE_AGAIN), ({**single, **started}, AGAIN))
            for kind in KINDS
        )
        + sum(mismatches([answers[PLAIN]], [answers[name]]) for name in (ADAPTIVE, DRAFTS)),
    }
    table = table_of(_COLUMNS, rows, section=lambda row: row["part"])
    return conclude(assembly, out, rows, summary, table, *(f"{key}: {value}" for key, value in summary.items()))


_COLUMNS: tuple[Column, ...] = (
    ("part", lambda row: row["part"]),
    ("what", lambda row: row["what"]),
    ("tokens/s", lambda row: "{:.1f} by {:.1f}".format(*row["tokens_per_second"])),
    ("ratio", lambda row: "{:.3f} [{:.3f}, {:.3f}]".format(*row["ratio"])),
)
