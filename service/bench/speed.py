"""`adaptree bench speed`: anatomy of the engine in-process, without HTTP; what a client gets: `adaptree bench serve`.

It compares plain with speculative decoding of the same prompts, in turn.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, Protocol

from rich.table import Table

from service.assembly import Assembly
from service.bench.driver import Run, generate
from service.bench.experiment import (
    PLAIN,
    SPECULATIVE,
    Column,
    Contestant,
    Measure,
    Row,
    counted,
    decode_tokens_per_second,
    mismatches,
    plain_engine,
    prepare,
    read_sets,
    report,
    table_of,
    take_turns,
    tau,
    tokens_per_second,
    warm_up,
)
from service.conditions import Conditions, conditions_of
from service.config import ServiceConfig
from service.engine.requests import GenerationRequest
from service.text.prompts import PromptSet


class Peer(Protocol):
    """Another engine. Each of its answers has exactly `max_tokens` tokens."""

    conditions: Conditions
    """Its versions and settings, for the report."""

    def __call__(self, requests: Sequence[GenerationRequest]) -> Run: ...


def contestants_of(assembly: Assembly, peers: Mapping[str, Contestant] | None = None) -> dict[str, Contestant]:
    """Return plain decoding, the configured speculation, and other engines, all on the same weights."""
    engines = {PLAIN: plain_engine(assembly), SPECULATIVE: assembly.engine()}
    return {**{name: partial(generate, engine) for name, engine in engines.items()}, **(peers or {})}


def measure_set(
    prompts: PromptSet,
    contestants: Mapping[str, Contestant],
    measure: Measure,
    advance: Callable[[int], None] = lambda prompts: None,
) -> Row:
    """Let every contestant answer every prompt; tokens per second include prompts, except those of `decode`."""
    runs = take_turns(prompts.prompts, contestants, measure, advance)
    plain, speculative = runs[PLAIN], runs[SPECULATIVE]
    speeds = {name: tokens_per_second(mine) for name, mine in runs.items()}
    peers = {name: speed for name, speed in speeds.items() if name not in (PLAIN, SPECULATIVE)}
    decode = [decode_tokens_per_second(mine) for mine in (plain, speculative)]
    steps = [step for run in speculative for step in run.steps]
    accepted = Counter[str]()
    for step in steps:
        accepted.update(step.stats.accepted_by_source)
    return {
        "set": prompts.name,
        "temperature": measure.temperature,
        "concurrency": measure.concurrency,
        "prompts": len(prompts.prompts),
        "tokens": sum(run.num_tokens for run in plain),
        "plain_tokens_per_second": speeds[PLAIN],
        "speculative_tokens_per_second": speeds[SPECULATIVE],
        "speedup": speeds[SPECULATIVE] / speeds[PLAIN],
        "plain_decode_tokens_per_second": decode[0],
        "speculative_decode_tokens_per_second": decode[1],
        "decode_speedup": decode[1] / decode[0] if decode[0] else 1.0,
        "tau": tau(speculative),
        "draft_share": sum(step.stats.draft_seconds for step in steps) / sum(step.seconds for step in steps),
        "mismatched_tokens": mismatches(plain, speculative),
        "accepted_by_source": dict(sorted(accepted.items())),
        "peers": peers,
        "over_peers": {
            name: {ours: speeds[ours] / speed for ours in (PLAIN, SPECULATIVE)} for name, speed in peers.items()
        },
    }


def summary_of(rows: Sequence[Row]) -> dict[str, object]:
    """Return means over all sets and by temperature; those of ratios of speeds are geometric."""
    temperatures = dict.fromkeys(row["temperature"] for row in rows)
    groups = [[row for row in rows if row["temperature"] == temperature] for temperature in temperatures]
    return {
        **_means(rows),
        "by_temperature": [{"temperature": mine[0]["temperature"], **_means(mine)} for mine in groups],
    }


def _means(rows: Sequence[Row]) -> dict[str, object]:
    return {
        "sets": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "speedup": geometric_mean([row["speedup"] for row in rows]),
        "lowest_speedup": min(row["speedup"] for row in rows),
        "tau": fmean(row["tau"] for row in rows),
        "draft_share": fmean(row["draft_share"] for row in rows),
        "mismatched_tokens": sum(row["mismatched_tokens"] for row in rows),
        "over_peers": {
            name: {ours: geometric_mean([row["over_peers"][name][ours] for row in rows]) for ours in ratios}
            for name, ratios in rows[0]["over_peers"].items()
        },
    }


def run_speed(
    config: ServiceConfig,
    files: Sequence[Path],
    measures: Sequence[Measure],
    *,
    limit: int | None,
    out: Path | None,
    peers: Mapping[str, Callable[[Assembly], Peer]] | None = None,
) -> bool:
    """Measure all files, print a table and write the report to `out`.

    `limit` is the most prompts of each file; `peers` build other engines that answer the same prompts. Returns whether
    plain and speculative text were the same.
    """
    assembly = prepare(config, out)
    sets = read_sets(assembly, files, limit, measures[0].max_tokens)
    others = {name: build(assembly) for name, build in (peers or {}).items()}
    rows = _measured(sets, contestants_of(assembly, others), measures)
    summary = summary_of(rows)
    conditions = dict(conditions_of(assembly))
    for peer in others.values():
        conditions |= peer.conditions
    return report(conditions, out, rows, summary, _table(rows, summary))


def _measured(
    sets: Sequence[PromptSet], contestants: Mapping[str, Contestant], measures: Sequence[Measure]
) -> list[Row]:
    """Return one row for each set at each temperature."""
    warm_up(contestants, sets[0].prompts[0], measures[0])
    rows = []
    with counted(len(measures) * sum(len(prompts.prompts) for prompts in sets)) as advance:
        for measure, prompts in product(measures, sets):
            advance(0, f"{prompts.name}, T = {measure.temperature:g}")
            rows.append(measure_set(prompts, contestants, measure, advance))
    return rows


_COLUMNS: tuple[Column, ...] = (
    ("set", lambda row: row["set"]),
    ("T", lambda row: f"{row['temperature']:g}"),
    ("tokens", lambda row: f"{row['tokens']:,}"),
    ("plain", lambda row: f"{row['plain_tokens_per_second']:.1f}"),
    ("speculative", lambda row: f"{row['speculative_tokens_per_second']:.1f}"),
    ("speedup", lambda row: f"{row['speedup']:.2f}"),
    ("plain, decode", lambda row: f"{row['plain_decode_tokens_per_second']:.1f}"),
    ("speculative, decode", lambda row: f"{row['speculative_decode_tokens_per_second']:.1f}"),
    ("speedup, decode", lambda row: f"{row['decode_speedup']:.2f}"),
    ("tau", lambda row: f"{row['tau']:.2f}"),
    ("drafting", lambda row: f"{100 * row['draft_share']:.1f} %"),
    ("mismatched", lambda row: str(row["mismatched_tokens"])),
)


_CAPTION = (
    "speeds in tokens per second, prompts included; decode: without the steps that read prompts; "
    "mean: over sets, those of ratios of speeds geometric"
)


def _peer_columns(name: str) -> list[Column]:
    ratios = [(f"{ours} / {name}", partial(_ratio, name, ours)) for ours in (PLAIN, SPECULATIVE)]
    return [(name, lambda row: f"{row['peers'][name]:.1f}"), *ratios]


def _ratio(peer: str, ours: str, row: Row) -> str:
    return f"{row['over_peers'][peer][ours]:.2f}"


def _table(rows: Sequence[Row], summary: dict[str, Any]) -> Table:
    """Return the rows, and below them each temperature's means."""
    peers = list(rows[0]["peers"])
    columns = [*_COLUMNS, *(column for name in peers for column in _peer_columns(name))]
    table = table_of(columns, rows, caption=_CAPTION, section=lambda row: row["temperature"])
    for means in summary["by_temperature"]:
        quality = [f"{means['tau']:.2f}", f"{100 * means['draft_share']:.1f} %", str(means["mismatched_tokens"])]
        speeds = ["", "", f"{means['speedup']:.2f}", "", "", ""]
        ratios = (["", _ratio(name, PLAIN, means), _ratio(name, SPECULATIVE, means)] for name in peers)
        table.add_row(
            *("mean", f"{means['temperature']:g}", f"{means['tokens']:,}"), *speeds, *quality, *chain(*ratios)
        )
    return table
