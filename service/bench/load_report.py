"""What `adaptree bench load` does around the measurement: load, take turns, show progress, print, draw, write."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from drafters.tree import MAX_NODES
from service.assembly import Assembly, assemble
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.load import Arrivals, ClosedLoop, Drive, LoadRun, PoissonArrivals, drive
from service.bench.load_plot import plot_load
from service.bench.load_policies import engine_for, policy_names
from service.bench.load_rows import LoadRow, Slo, row_of, summary_of
from service.bench.prompts import read_prompts, refuse_too_long
from service.bench.speed import Measure, requests_from
from service.config import ServiceConfig
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest
from service.errors import StartupError
from service.logging import counting

_WARM_UP_TOKENS = 8
_ROUNDS = 8
"""Requests of each client at least. The first ones are not measured, for everybody asks at once; nor are the last."""
_SPREAD = 0.5
"""Of the length asked for, by which answers are shorter or longer: equal ones would end together, and all clients' next
prompts be read together, for ever."""
_SLICE_SECONDS = 2.0
"""After which the next policy goes on: a machine that is slow for a while is then slow for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What is asked, how and how often."""

    files: tuple[Path, ...]
    concurrency: tuple[int, ...]
    policies: str
    requests: int  # for each policy and concurrency, at least
    temperature: float
    max_tokens: int
    rate_per_second: float | None  # None: a closed loop
    slo: Slo
    seed: int

    @property
    def arrival(self) -> str:
        return "closed" if self.rate_per_second is None else "poisson"

    @property
    def most_tokens(self) -> int:
        """Of an answer."""
        return self.max_tokens + int(_SPREAD * self.max_tokens)

    def requests_at(self, concurrency: int) -> int:
        return self.requests if self.rate_per_second is not None else max(self.requests, _ROUNDS * concurrency)


def run_load(config: ServiceConfig, plan: LoadPlan, *, plot: Path | None, out: Path | None) -> bool:
    """Measure every policy at every concurrency and report; whether all texts were the same."""
    refuse_unwritable(out)
    refuse_unwritable(plot)
    names = policy_names(plan.policies)
    assembly = assemble(config)
    rows = _measure_all(assembly, names, _prompts(assembly, plan), plan)
    summary = summary_of(rows)
    console = Console()
    console.print(_table(rows))
    for name, value in summary.items():
        console.print(f"{name}: {value}")
    if plot is not None:
        plot_load(rows, plot, title=f"{config.public_model_name}, {assembly.drafter_name}")
    write_report(out, conditions_of(assembly), [row.as_json() for row in rows], summary)
    return summary["mismatched_tokens"] == 0


def _prompts(assembly: Assembly, plan: LoadPlan) -> list[tuple[int, ...]]:
    """Prompts of all files in turn, as many as requests, from the beginning again where there are fewer."""
    most = max(map(plan.requests_at, plan.concurrency))
    sets = [read_prompts(file, assembly.tokenizer, limit=most).prompts for file in plan.files]
    mixed = [prompts[place] for place in range(max(map(len, sets))) for prompts in sets if place < len(prompts)]
    refuse_too_long(mixed, plan.most_tokens, assembly.limits.max_model_len, "the prompts")
    return [mixed[number % len(mixed)] for number in range(most)]


def _measure_all(
    assembly: Assembly, names: Sequence[str], prompts: Sequence[Sequence[int]], plan: LoadPlan
) -> list[LoadRow]:
    longest = max(map(len, prompts)) + plan.most_tokens
    engines = _engines(assembly, names, longest=longest, most_sequences=max(plan.concurrency))
    measure = Measure(plan.temperature, plan.max_tokens, len(prompts), plan.seed)
    requests = _of_all_lengths(requests_from(prompts, 0, measure), plan)
    _warm_up(engines, requests)
    rows: list[LoadRow] = []
    with counting() as progress:
        task = progress.add_task("", total=len(names) * sum(map(plan.requests_at, plan.concurrency)))
        for concurrency in plan.concurrency:
            progress.update(task, description=f"concurrency {concurrency}")
            part = requests[: plan.requests_at(concurrency)]
            runs = _in_slices(
                {name: Drive(engines[name], part, _arrivals(concurrency, len(part), plan)) for name in names},
                lambda finished: progress.advance(task, finished),
            )
            rows += [_row(name, runs, concurrency, plan) for name in names]
    return rows


def _of_all_lengths(requests: Sequence[GenerationRequest], plan: LoadPlan) -> list[GenerationRequest]:
    """The same, with answers of all lengths around the one that is planned."""
    rng, most = random.Random(plan.seed), plan.most_tokens
    fewest = max(1, 2 * plan.max_tokens - most)
    return [replace(one, sampling=replace(one.sampling, max_tokens=rng.randint(fewest, most))) for one in requests]


def _engines(assembly: Assembly, names: Sequence[str], *, longest: int, most_sequences: int) -> dict[str, Engine]:
    """An engine for each policy. They share the pool's slots equally, for none is idle when the next one goes on.

    They keep no texts: every concurrency asks the same prompts again, and how many of them are still there would depend
    on the room that a policy's trees need.
    """
    share = (assembly.target.pool.num_slots - 1) // len(names)
    if share < longest + MAX_NODES + 1:
        raise StartupError(
            f"{len(names)} policies share the key/value pool, and {share} tokens are too few for a text of {longest}: "
            "raise kv_cache or name fewer policies"
        )
    limits = replace(
        assembly.limits,
        max_model_len=longest,
        max_sequences=max(assembly.limits.max_sequences, most_sequences),
        num_slots=share + 1,
        prefix_cache=False,
    )
    return {
        name: engine_for(assembly, name, replace(limits, first_slot=limits.first_slot + place * share))
        for place, name in enumerate(names)
    }


def _in_slices(drives: dict[str, Drive], finished: Callable[[int], None]) -> dict[str, LoadRun]:
    """Every policy's run of the same requests; they take turns, and each is first equally often."""
    turn, under_way = 0, list(drives)
    while under_way:
        for name in _order(under_way, turn):
            before = drives[name].num_finished
            drives[name].go_on(_SLICE_SECONDS)
            finished(drives[name].num_finished - before)
        turn, under_way = turn + 1, [name for name in under_way if not drives[name].is_over]
    return {name: driven.result() for name, driven in drives.items()}


def _order(names: list[str], turn: int) -> list[str]:
    """Each is first equally often, and nobody always follows the same one."""
    shift = turn % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if turn % 2 else order


def _arrivals(concurrency: int, count: int, plan: LoadPlan) -> Arrivals:
    if plan.rate_per_second is None:
        return ClosedLoop(concurrency)
    return PoissonArrivals(plan.rate_per_second, count, seed=plan.seed)


def _row(name: str, runs: dict[str, LoadRun], concurrency: int, plan: LoadPlan) -> LoadRow:
    return row_of(
        name,
        runs[name],
        next(iter(runs.values())),
        concurrency=concurrency,
        arrival=plan.arrival,
        rate=plan.rate_per_second,
        slo=plan.slo,
    )


def _warm_up(engines: dict[str, Engine], requests: Sequence[GenerationRequest]) -> None:
    """Answers that are not measured: first calls allocate and choose code paths."""
    few = [
        replace(one, sampling=replace(one.sampling, max_tokens=min(_WARM_UP_TOKENS, one.sampling.max_tokens)))
        for one in requests[:2]
    ]
    for engine in engines.values():
        drive(engine, few, ClosedLoop(len(few)))


def _table(rows: Sequence[LoadRow]) -> Table:
    titles = ["tokens/s", "goodput", "TTFT p50", "p95", "p99", "ITL p50", "p95", "p99", "budget", "tau", "undrafted"]
    table = Table("concurrency", "policy", *titles, "cost error", "ECE", "mismatched")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        ends = following is None or following.concurrency != row.concurrency
        table.add_row(str(row.concurrency), row.policy, *_cells(row), end_section=ends)
    table.caption = (
        "tokens/s: from when all clients were answered once until the first has nothing left to ask; goodput: those of "
        "requests within the bounds; TTFT: seconds to the first token; ITL: milliseconds per further token; budget: "
        "nodes per sequence and step; undrafted: share of steps without nodes"
    )
    return table


def _cells(row: LoadRow) -> list[str]:
    firsts = (row.ttft_p50_seconds, row.ttft_p95_seconds, row.ttft_p99_seconds)
    gaps = (row.itl_p50_seconds, row.itl_p95_seconds, row.itl_p99_seconds)
    return [
        f"{row.tokens_per_second:.1f}",
        f"{row.goodput_tokens_per_second:.1f}",
        *(f"{seconds:.2f}" for seconds in firsts),
        *(f"{1000 * seconds:.1f}" for seconds in gaps),
        f"{row.mean_budget:.1f}",
        f"{row.tau:.2f}",
        f"{100 * row.undrafted_share:.0f} %",
        *("" if value is None else f"{100 * value:.1f} %" for value in (row.cost_error, row.survival_error)),
        str(row.mismatched_tokens),
    ]
