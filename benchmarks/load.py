"""`python -m benchmarks load`: budget policies under rising load, in-process, without HTTP.

What clients get: `adaptree bench serve --concurrency N,...`. Policies by name:

plain     no drafting
again     no drafting, once more: what equal engines differ by
fixed:N   N nodes per sequence and step
adaptive  the configured budget by cost
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import typer

from drafters.tree import MAX_NODES
from service.assembly import Assembly
from service.bench.commands import AnswerTokens, MorePromptFiles, Out, PromptFiles, Seed, Temperature, numbers
from service.bench.driver import ClosedLoop, Drive, Run, Span, generate
from service.bench.experiment import (
    PLAIN,
    Column,
    Measure,
    Row,
    conclude,
    counted,
    figures_of,
    mismatches,
    plain_engine,
    prepare,
    read_sets,
    requests_from,
    rotated,
    shown,
    speed_ratio,
    table_of,
    warm_up,
)
from service.config import LoadedConfig
from service.engine.budget import FixedBudget
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest
from service.errors import StartupError
from service.observability.metric_tables import cost_errors

ADAPTIVE = "adaptive"
AGAIN = "again"
FIXED = "fixed:"

_WARM_UP_TOKENS = 8
_ROUNDS = 8
"""Requests of each client at least; the first and the last are not measured."""
_SPREAD = 0.5
"""Share by which answers are shorter or longer: equal ones would always end together."""
_PER_TURN = 2
"""Clients for each request that a turn answers. Turns are short, so that a machine that is slow for a while is slow for
all policies, and end at a request, so that all policies do the same work in a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Prompts, load and policies of a measurement."""

    files: tuple[Path, ...]
    concurrency: tuple[int, ...]
    requests: int  # fewest requests for each policy and concurrency
    measure: Measure  # its concurrency is not used

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest answer."""
        return answer_lengths(self.measure.max_tokens)[1]

    def requests_at(self, concurrency: int) -> int:
        """Requests of each policy."""
        return max(self.requests, _ROUNDS * concurrency)


def answer_lengths(max_tokens: int) -> tuple[int, int]:
    """Return the fewest and the most tokens of answers that have `max_tokens` on average."""
    spread = int(_SPREAD * max_tokens)
    return max(1, max_tokens - spread), max_tokens + spread


def row_of(policy: str, run: Run, reference: Run, concurrency: int, turns: Mapping[str, Sequence[Span]]) -> Row:
    """Return the figures of a policy's run; `reference` is another policy's run of the same requests. `turns`: those of
    all policies while the load is steady, the first policy's first."""
    steps = [step.stats for step in run.steps]
    errors = [error for step in steps for error in cost_errors(step)]
    calibration = [step.survival_error for step in steps if step.survival_error is not None]
    return {
        "policy": policy,
        "concurrency": concurrency,
        **figures_of([run]),
        "tokens_per_second": run.steady.tokens / run.steady.seconds,  # while the load is steady
        "turns": len(turns[policy]),
        "over_first": speed_ratio(turns[policy], next(iter(turns.values()))),
        # nodes per decoding sequence and step
        "mean_budget": sum(step.drafted_nodes for step in steps)
        / max(1, sum(len(answer.accepted_per_step) for answer in run.answers)),
        "undrafted_share": fmean(step.drafted_nodes == 0 for step in steps),  # share of steps without nodes
        "cost_error": median(errors) if errors else None,  # median over the verifies
        "survival_error": calibration[-1] if calibration else None,  # calibration error of survival at the end
        "mismatched_tokens": mismatches([reference], [run]),
    }


def summary_of(rows: Sequence[Row]) -> dict[str, object]:
    """Return the lowest speed of each policy over the first one, and how many tokens differ."""
    lowest: dict[str, float] = {}
    for row in rows:
        lowest[row["policy"]] = min(row["over_first"][0], lowest.get(row["policy"], row["over_first"][0]))
    return {"lowest_over_first": lowest, "mismatched_tokens": sum(row["mismatched_tokens"] for row in rows)}


def policies_of(text: str) -> dict[str, FixedBudget | None]:
    """Parse POLICY,... into static policies by name; None is the configured one. Raises StartupError."""
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise StartupError("--policies names none: give for example plain,fixed:16,adaptive")
    return {name: None if name == ADAPTIVE else _static(name) for name in names}


def _static(name: str) -> FixedBudget:
    _, _, nodes = name.partition(":")
    if name in (PLAIN, AGAIN):
        return FixedBudget(0)
    if name.startswith(FIXED) and nodes.isdigit() and int(nodes) <= MAX_NODES:
        return FixedBudget(int(nodes))
    raise StartupError(f"--policies: {name!r} is none of plain, again, adaptive and fixed:N (N up to {MAX_NODES})")


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    concurrency: Annotated[str, typer.Option(metavar="N,...", help="Requests in flight.")] = "1,2,4,8,16,32",
    policies: Annotated[
        str, typer.Option(metavar="POLICY,...", help="plain, again, fixed:N and adaptive.")
    ] = "plain,fixed:8,fixed:16,fixed:32,adaptive",
    requests: Annotated[
        int, typer.Option(min=1, help="Requests for each policy and concurrency; eight for each client at least.")
    ] = 64,
    temperature: Temperature = 0.0,
    max_tokens: AnswerTokens = 64,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare budget policies under rising load. Exit code 1 if any token differs."""
    plan = LoadPlan(
        files=(*prompts, *(more_prompts or [])),
        concurrency=numbers(concurrency),
        requests=requests,
        measure=Measure(temperature, max_tokens, 1, seed),
    )
    chosen = policies_of(policies)
    assembly = prepare(loaded.config, out)
    rows = _measure_all(assembly, chosen, _prompts(assembly, plan), plan)
    summary = summary_of(rows)
    table = table_of(_COLUMNS, rows, caption=_CAPTION, section=lambda row: row["concurrency"])
    return conclude(assembly, out, rows, summary, table, *(f"{name}: {value}" for name, value in summary.items()))


def _prompts(assembly: Assembly, plan: LoadPlan) -> list[tuple[int, ...]]:
    """Return prompts of all files in turn, as many as requests of all loads, repeated where there are fewer."""
    most = sum(map(plan.requests_at, plan.concurrency))
    sets = read_sets(assembly, plan.files, most, plan.most_tokens)
    mixed = [prompt for row in zip_longest(*(one.prompts for one in sets)) for prompt in row if prompt is not None]
    return [mixed[number % len(mixed)] for number in range(most)]


def _measure_all(
    assembly: Assembly,
    policies: Mapping[str, FixedBudget | None],
    prompts: Sequence[Sequence[int]],
    plan: LoadPlan,
) -> list[Row]:
    engines = engines_of(assembly, policies, max(map(len, prompts)) + plan.most_tokens, max(plan.concurrency))
    few = replace(plan.measure, max_tokens=min(_WARM_UP_TOKENS, plan.measure.max_tokens), concurrency=2)
    warm_up({name: partial(generate, engine) for name, engine in engines.items()}, prompts[0], few)
    requests = iter(_of_all_lengths(requests_from(prompts, 0, replace(plan.measure, concurrency=len(prompts))), plan))
    rows: list[Row] = []
    with counted(len(engines) * sum(map(plan.requests_at, plan.concurrency))) as advance:
        for concurrency in plan.concurrency:
            advance(0, f"concurrency {concurrency}")
            part = [*islice(requests, plan.requests_at(concurrency))]  # of its own: past answers are remembered
            drives = {name: Drive(engine, part, ClosedLoop(concurrency)) for name, engine in engines.items()}
            turns = _in_turns(drives, max(1, concurrency // _PER_TURN), advance)
            runs = {name: driven.result() for name, driven in drives.items()}
            reference = next(iter(runs.values()))
            rows += [row_of(name, run, reference, concurrency, turns) for name, run in runs.items()]
    return rows


def _of_all_lengths(requests: Sequence[GenerationRequest], plan: LoadPlan) -> list[GenerationRequest]:
    """Return the requests with answers of all lengths around the planned one."""
    rng, lengths = random.Random(plan.measure.seed), answer_lengths(plan.measure.max_tokens)
    return [replace(one, sampling=replace(one.sampling, max_tokens=rng.randint(*lengths))) for one in requests]


def engines_of(
    assembly: Assembly, policies: Mapping[str, FixedBudget | None], longest: int, most_sequences: int
) -> dict[str, Engine]:
    """Return an engine per policy, with equal shares of the slots and no prefix cache, as prompts repeat.

    Raises StartupError without measured costs, with too few slots, or with recurrent layers if there are several.
    """
    if ADAPTIVE in policies and assembly.costs is None:
        raise StartupError("the adaptive policy needs measured costs: set budget_policy to cost")
    has_states, rows = bool(assembly.loaded.kv_shape.bytes_per_state), assembly.limits.max_sequences
    if has_states and (len(policies) > 1 or most_sequences > rows):
        raise StartupError(
            f"engines that take turns would overwrite each other's states of recurrent layers, of which there are "
            f"{rows}: measure one policy in each run, and set max_sequences to at least {most_sequences}"
        )
    share = (assembly.target.pool.num_slots - 1) // len(policies)
    if share < longest + MAX_NODES + 1:
        raise StartupError(
            f"{len(policies)} policies share the key/value pool, and {share} tokens are too few for a text of "
            f"{longest}: raise kv_cache or name fewer policies"
        )
    limits = replace(
        assembly.limits,
        max_model_len=longest,
        max_sequences=max(assembly.limits.max_sequences, most_sequences),
        num_slots=share + 1,
        prefix_cache=False,
    )
    engines = {}
    for number, (name, policy) in enumerate(policies.items()):
        mine = replace(limits, first_slot=limits.first_slot + number * share)
        is_plain = name in (PLAIN, AGAIN)
        engines[name] = plain_engine(assembly, mine) if is_plain else assembly.engine(policy=policy, limits=mine)
    return engines


def _in_turns(drives: Mapping[str, Drive], requests: int, finished: Callable[[int], None]) -> dict[str, list[Span]]:
    """Let the policies answer the same requests in turns of so many; returns the turns with a steady load."""
    turns: list[dict[str, Span]] = []
    while under_way := [name for name, drive in drives.items() if not drive.is_over]:
        turns.append({})
        for name in rotated(under_way, len(turns)):
            drive = drives[name]
            num_finished, before = drive.num_finished, drive.steady
            drive.go_on(requests=len(turns) * requests - num_finished)  # a step may have ended more
            finished(drive.num_finished - num_finished)
            turns[-1][name] = Span(drive.steady.seconds - before.seconds, drive.steady.tokens - before.tokens)
    steady = [turn for turn in turns if len(turn) == len(drives) and any(span.tokens for span in turn.values())]
    return {name: [turn[name] for turn in steady] for name in drives}


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


_COLUMNS: tuple[Column, ...] = (
    ("concurrency", lambda row: str(row["concurrency"])),
    ("policy", lambda row: row["policy"]),
    ("tokens/s", lambda row: f"{row['tokens_per_second']:.1f}"),
    ("over the first", lambda row: shown(row["over_first"])),
    ("TTFT", lambda row: f"{row['median_ttft_ms']:.0f}"),
    ("p99", lambda row: f"{row['p99_ttft_ms']:.0f}"),
    ("ITL", lambda row: f"{row['median_itl_ms']:.1f}"),
    ("p99", lambda row: f"{row['p99_itl_ms']:.1f}"),
    ("budget", lambda row: f"{row['mean_budget']:.1f}"),
    ("tau", lambda row: f"{row['tau']:.2f}"),
    ("undrafted", lambda row: f"{100 * row['undrafted_share']:.0f} %"),
    ("cost error", lambda row: _share(row["cost_error"])),
    ("ECE", lambda row: _share(row["survival_error"])),
    ("mismatched", lambda row: str(row["mismatched_tokens"])),
)
_CAPTION = (
    "tokens/s: while all clients are busy; TTFT, ITL: milliseconds to the first token and per further token, medians; "
    "budget: nodes per sequence and step; undrafted: share of steps without nodes"
)
