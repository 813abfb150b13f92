"""`python -m benchmarks budgets`: the budget by cost against fixed ones, on the same prompts in turn.

Also how long its steps took by their number of rows, and how well that was predicted.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from benchmarks.load import ADAPTIVE, FIXED, engines_of, policies_of
from benchmarks.shared import percentile
from service.bench.commands import AnswerTokens, Limit, MorePromptFiles, Out, PromptFiles, Seed, Temperature
from service.bench.driver import Run, generate
from service.bench.experiment import (
    Column,
    Measure,
    Row,
    conclude,
    counted,
    mismatches,
    prepare,
    read_sets,
    shown,
    speed_ratio,
    table_of,
    take_turns,
    tau,
    tokens_per_second,
    warm_up,
)
from service.config import LoadedConfig

_WARM_UP_TOKENS = 8
_FEW = 20  # fewest steps of a number of rows that is reported


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    limit: Limit = None,
    policies: Annotated[
        str, typer.Option(metavar="POLICY,...", help="plain, fixed:N and adaptive.")
    ] = "plain,fixed:1,fixed:2,fixed:3,fixed:5,fixed:8,adaptive",
    temperature: Temperature = 0.0,
    max_tokens: AnswerTokens = 64,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare the adaptive budget with fixed ones. Exit code 1 if any token differs."""
    chosen, measure = policies_of(policies), Measure(temperature, max_tokens, 1, seed)
    assembly = prepare(loaded.config, out)
    sets = read_sets(assembly, [*prompts, *(more_prompts or [])], limit, max_tokens)
    mixed = [prompt for one in sets for prompt in one.prompts]
    engines = engines_of(assembly, chosen, max(map(len, mixed)) + max_tokens, 1)
    contestants = {name: partial(generate, engine) for name, engine in engines.items()}
    warm_up(contestants, mixed[0], replace(measure, max_tokens=_WARM_UP_TOKENS))
    with counted(len(mixed), "prompts") as advance:
        runs = take_turns(mixed, contestants, measure, advance)
    rows = [_row(name, runs) for name in runs]
    fixed = {row["policy"]: row["tokens_per_second"] for row in rows if row["policy"].startswith(FIXED)}
    best = max(fixed, key=fixed.__getitem__, default=ADAPTIVE)
    summary = {
        "prompts": {one.name: len(one.prompts) for one in sets},
        "best_fixed": best,
        "adaptive_over_best_fixed": speed_ratio(runs[ADAPTIVE], runs[best]),
        "steps": run_steps(runs[ADAPTIVE]),
        "mismatched_tokens": sum(row["mismatched_tokens"] for row in rows),
    }
    shown_steps = (f"{rows} rows: {figures}" for rows, figures in summary["steps"].items())
    return conclude(assembly, out, rows, summary, table_of(_COLUMNS, rows), *shown_steps)


def _row(name: str, runs: Mapping[str, Sequence[Run]]) -> Row:
    mine = runs[name]
    return {
        "policy": name,
        "tokens_per_second": tokens_per_second(mine),
        "adaptive_over_it": speed_ratio(runs[ADAPTIVE], mine),
        "tau": tau(mine),
        "mismatched_tokens": mismatches(next(iter(runs.values())), mine),
    }


def run_steps(runs: Sequence[Run]) -> dict[int, dict[str, float]]:
    """Compute figures of the steps that read no prompt, by their number of rows."""
    found = defaultdict[int, list[tuple[float, float]]](list)
    for step in (step.stats for run in runs for step in run.steps):
        if not step.prompt_tokens and step.predicted_verify_seconds is not None:
            found[step.verify_rows].append((step.verify_seconds, step.predicted_verify_seconds))
    return {
        rows: {
            "steps": len(pairs),
            "milliseconds": 1e3 * percentile([seconds for seconds, _ in pairs], 50),
            "predicted_over_measured": percentile([predicted / seconds for seconds, predicted in pairs], 50),
        }
        for rows, pairs in sorted(found.items())
        if len(pairs) >= _FEW
    }


_COLUMNS: tuple[Column, ...] = (
    ("policy", lambda row: row["policy"]),
    ("tokens/s", lambda row: f"{row['tokens_per_second']:.1f}"),
    ("adaptive over it", lambda row: shown(row["adaptive_over_it"])),
    ("tau", lambda row: f"{row['tau']:.2f}"),
    ("mismatched", lambda row: str(row["mismatched_tokens"])),
)
