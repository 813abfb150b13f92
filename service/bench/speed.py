"""`adaptree bench speed`: compares plain and speculative decoding of the same prompts, in turn, inside this process.

Without HTTP; `adaptree bench serve` measures what clients get.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean

from rich.table import Table

from service.assembly import Assembly
from service.bench.driver import generate
from service.bench.experiment import (
    PLAIN,
    SPECULATIVE,
    Column,
    Contestant,
    Measure,
    Row,
    conclude,
    counted,
    decode_tokens_per_second,
    mismatches,
    plain_engine,
    prepare,
    read_sets,
    table_of,
    take_turns,
    tau,
    tokens_per_second,
    warm_up,
)
from service.config import ServiceConfig
from service.text.prompts import PromptSet


def contestants_of(assembly: Assembly) -> dict[str, Contestant]:
    """Build the contestants: plain decoding and the configured speculation, on the same weights."""
    engines = {PLAIN: plain_engine(assembly), SPECULATIVE: assembly.engine()}
    return {name: partial(generate, engine) for name, engine in engines.items()}


def measure_set(
    prompts: PromptSet,
    contestants: Mapping[str, Contestant],
    measure: Measure,
    advance: Callable[[int], None] = lambda prompts: None,
) -> Row:
    """Let both contestants answer every prompt of a set; returns a row of figures. Tokens per second include the time
    of reading prompts, except for the `decode` figures."""
    runs = take_turns(prompts.prompts, contestants, measure, advance)
    plain, speculative = runs[PLAIN], runs[SPECULATIVE]
    speeds = {name: tokens_per_second(mine) for name, mine in runs.items()}
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
        "tokens_per_second": speeds,
    }


def summary_of(rows: Sequence[Row]) -> Row:
    """Compute means over all sets, in all and by temperature; they are geometric for ratios of speeds."""
    temperatures = dict.fromkeys(row["temperature"] for row in rows)
    groups = [[row for row in rows if row["temperature"] == temperature] for temperature in temperatures]
    return {
        **_means(rows),
        "by_temperature": [{"temperature": mine[0]["temperature"], **_means(mine)} for mine in groups],
    }


def _means(rows: Sequence[Row]) -> Row:
    return {
        "sets": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "speedup": geometric_mean([row["speedup"] for row in rows]),
        "lowest_speedup": min(row["speedup"] for row in rows),
        "tau": fmean(row["tau"] for row in rows),
        "draft_share": fmean(row["draft_share"] for row in rows),
        "mismatched_tokens": sum(row["mismatched_tokens"] for row in rows),
    }


def run_speed(
    config: ServiceConfig, files: Sequence[Path], measures: Sequence[Measure], *, limit: int | None, out: Path | None
) -> bool:
    """Measure at most `limit` prompts of each file, print a table and write the report to `out`. Returns whether plain
    and speculative text were the same."""
    assembly = prepare(config, out)
    sets = read_sets(assembly, files, limit, measures[0].max_tokens)
    rows = measured(sets, contestants_of(assembly), measures)
    summary = summary_of(rows)
    return conclude(assembly, out, rows, summary, _table(rows, summary))


def measured(
    sets: Sequence[PromptSet], contestants: Mapping[str, Contestant], measures: Sequence[Measure]
) -> list[Row]:
    """Warm up, then measure each set at each temperature; returns one row of figures for each."""
    warm_up(contestants, sets[0].prompts[0], measures[0])
    rows = []
    with counted(len(measures) * sum(len(prompts.prompts) for prompts in sets)) as advance:
        for measure, prompts in product(measures, sets):
            advance(0, f"{prompts.name}, T = {measure.temperature:g}")
            rows.append(measure_set(prompts, contestants, measure, advance))
    return rows


COLUMNS: tuple[Column, ...] = (
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


CAPTION = (
    "speeds in tokens per second, prompts included; decode: without the steps that read prompts; "
    "mean: over sets, geometric for ratios of speeds"
)


def _table(rows: Sequence[Row], summary: Row) -> Table:
    """Build a table of the rows, with the means of each temperature below."""
    table = table_of(COLUMNS, rows, caption=CAPTION, section=lambda row: row["temperature"])
    for means in summary["by_temperature"]:
        quality = [f"{means['tau']:.2f}", f"{100 * means['draft_share']:.1f} %", str(means["mismatched_tokens"])]
        speeds = ["", "", f"{means['speedup']:.2f}", "", "", ""]
        table.add_row("mean", f"{means['temperature']:g}", f"{means['tokens']:,}", *speeds, *quality)
    return table
