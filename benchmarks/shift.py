"""`python -m benchmarks shift`: what learning while serving gains, training included."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, get_args

import typer
from rich.table import Table

from benchmarks.policies import PolicyName
from benchmarks.shared import LongestAnswer, percentile
from benchmarks.shift_play import (
    PLAIN,
    Counts,
    Noted,
    Played,
    Stream,
    joined,
    play_all,
    players_of,
    repeated,
    shifted,
    turns_of,
    windows_of,
)
from service.bench.commands import Concurrency, Out, Seed, Temperature
from service.bench.experiment import (
    Interval,
    Measure,
    Row,
    conclude,
    mismatches,
    prepare,
    rate_ratio,
    read_sets,
)
from service.config import LoadedConfig
from service.errors import StartupError

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

_RECOVERED = 0.9
_REPORTED = ("training_seconds", "updates_head", "updates_full", "publishes", "refusals", "rollbacks")
_MARKS = {"published": "^", "refused": "x", "rolled_back": "v"}
TurnQueries = Annotated[int, typer.Option(min=1, help="Queries that a policy answers before the next one's turn.")]


def run(
    loaded: LoadedConfig,
    before: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Prompts of the first half. Give it again to mix several files.")
    ],
    after: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Prompts of the second half, likewise.")
    ] = None,
    queries: Annotated[int, typer.Option(min=2, help="Queries in all.")] = 300,
    policies: Annotated[
        str, typer.Option(metavar="POLICY,...", help="Who decides about updates; all are compared with `never`.")
    ] = "bandit,always,head_only,full_only,never",
    temperature: Temperature = 0.0,
    max_tokens: LongestAnswer = 64,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Instead of a shift: one mix of all files, so many times over.")
    ] = None,
    concurrency: Concurrency = 1,
    turn_queries: TurnQueries = 5,
    load: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, help="Let queries arrive at random, so that `never` is busy for this share."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep what each policy learns: `adaptree drafter export --from DIR/POLICY`."),
    ] = None,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare policies of learning when traffic changes, with a picture next to --out. Exit code 1 if any token
    differs."""
    chosen, measure = policies_of(policies), Measure(temperature, max_tokens, concurrency, seed)
    if not after and epochs is None:
        raise StartupError("give --after, which traffic changes to, or --epochs for a stream that does not change")
    assembly = prepare(loaded.config, out)
    old, new = (read_sets(assembly, files, None, max_tokens) for files in (before, after or []))
    stream = shifted(old, new, queries, seed) if epochs is None else repeated([*old, *new], queries, epochs, seed)
    turns = turns_of(stream, turn_queries, measure)
    with players_of(assembly, {policy: policy for policy in chosen}, seed, keep) as players:
        played = play_all(players, dict.fromkeys(chosen, turns), measure, load)
    summaries = {name: summary_of(mine, played[PLAIN], stream, seed=seed) for name, mine in played.items()}
    windows = {name: windows_of(mine) for name, mine in played.items()}
    if out is not None:
        draw(out.with_suffix(".png"), windows, stream)
    summary = {
        "queries": stream.num_queries,
        "new_from": stream.new_from,
        "mismatched_tokens": sum(summary["mismatched_tokens"] for summary in summaries.values()),
        "policies": summaries,
    }
    rows = [{"policy": name, **row} for name, mine in windows.items() for row in rows_of(mine, stream)]
    return conclude(assembly, out, rows, summary, _table(summaries, stream))


def policies_of(names: str) -> list[PolicyName]:
    """Parse POLICY,... Raises StartupError for unknown ones, and where the plain one is missing."""
    given = list(dict.fromkeys(name.strip() for name in names.split(",")))
    unknown = [name for name in given if name not in POLICIES]
    if unknown:
        raise StartupError(f"--policies: {', '.join(unknown)} is none of {', '.join(POLICIES)}")
    if PLAIN not in given:
        raise StartupError(f"--policies: add {PLAIN}, all others are compared with it")
    return [name for name in POLICIES if name in given]


def rows_of(windows: Sequence[Played], stream: Stream) -> list[Row]:
    """Return one report row per window."""
    return [
        {
            "window": window.turn.window,
            "phase": stream.phases[window.turn.phase].name,
            "first_query": window.turn.first,
            "queries": len(window.turn.requests),
            "tau": window.tau,
            "tokens_per_second": window.speed,
            **window.counts,
        }
        for window in windows
    ]


def summary_of(played: Sequence[Played], plain: Sequence[Played], stream: Stream, *, seed: int) -> Row:
    """Compare a policy with the plain one, which may be itself; "before" is the first phase and "after" the last.

    Gains are None for the plain policy, `recovery_queries` where nothing was gained or published."""
    (old, plain_old), (new, plain_new) = (
        [[one for one in turns if one.turn.phase == phase] for turns in (played, plain)]
        for phase in (0, len(stream.phases) - 1)
    )
    before, after, whole = joined(old), joined(new), joined(played)
    final_gain, recovery = recovery_of(
        *([one for one in windows_of(turns) if one.turn.first >= stream.new_from] for turns in (played, plain))
    )
    gaps = [gap for step in whole.run.steps for gap in step.stats.itl_seconds]
    compares = played is not plain
    return {
        "tokens_per_second_before": before.speed,
        "tokens_per_second_after": after.speed,
        "gain_before": gain(old, plain_old, seed=seed) if compares else None,
        "gain_after": gain(new, plain_new, seed=seed) if compares else None,
        "tau_before": before.tau,
        "tau_after": after.tau,
        # from the first to the last windows after the change, above the plain policy's
        "final_tau_gain": final_gain if compares else None,
        "recovery_queries": recovery if whole.counts["publishes"] else None,
        "mismatched_tokens": mismatches([one.run for one in plain], [one.run for one in played]),
        **whole.counts,
        "training_share": whole.counts["training_seconds"] / whole.run.seconds,
        "busy_share": whole.seconds / whole.run.seconds,
        "latency_p95_seconds_after": percentile([one.seconds for one in after.run.answers], 95, method="linear"),
        "itl_p50_seconds": percentile(gaps, 50, method="linear"),
        "itl_p99_seconds": percentile(gaps, 99, method="linear"),
        "events": [event_row(noted) for noted in whole.noted],
    }


def gain(mine: Sequence[Played], plain: Sequence[Played], *, seed: int) -> Interval:
    """Return percent more tokens per second of service than plain, with its interval."""
    rates = ([(one.run.num_tokens, one.seconds) for one in turns] for turns in (mine, plain))
    ratio, low, high = (100 * (value - 1) for value in rate_ratio(*rates, seed=seed))
    return ratio, low, high


def recovery_of(mine: Sequence[Played], plain: Sequence[Played]) -> tuple[float, int | None]:
    """Return by how much tau above plain grew from the first window to the last quarter, and queries until 90 % of
    that; None where it did not grow."""
    ahead = [ours.tau - theirs.tau for ours, theirs in zip(mine, plain, strict=True)]
    final = fmean(ahead[-max(1, len(ahead) // 4) :]) - ahead[0]
    if final <= 0:
        return final, None
    reached = next(index for index, value in enumerate(ahead) if value - ahead[0] >= _RECOVERED * final)
    return final, sum(len(window.turn.requests) for window in mine[: reached + 1])


def event_row(noted: Noted) -> Row:
    """Return an event as JSON, which has no NaN: None for a score without texts."""
    event = noted.event
    numbers = {name: value if math.isfinite(value) else None for name, value in event.numbers.items()}
    described = {"kind": event.kind, "version": event.version, "reason": event.reason}
    return {"query": noted.query, **described, "numbers": numbers}


def columns_table(columns: Mapping[str, Mapping[str, object]], section_ends: Sequence[str]) -> Table:
    """Return a table with one column per name; a rule follows the titles in `section_ends`."""
    table = Table("", *columns)
    for title in next(iter(columns.values())):
        table.add_row(title, *(str(column[title]) for column in columns.values()), end_section=title in section_ends)
    return table


def learning_cells(counts: Counts) -> dict[str, object]:
    """Return cells with the counts of learning."""
    return {name.replace("_", ", "): counts[name] for name in _REPORTED[1:]}


def _table(summaries: Mapping[str, Row], stream: Stream) -> Table:
    ends = ("mismatched", "gain after", "recovery", "rollbacks")
    table = columns_table({name: _cells(summary) for name, summary in summaries.items()}, ends)
    table.caption = (
        f"before: {stream.phases[0].name}; after: {stream.phases[-1].name}; speed: tokens per second of service; "
        f"gain: over {PLAIN} on the same queries, with its 95 % interval; "
        "recovery: queries until 90 % of the final gain of tau"
    )
    return table


def _gain(gain: Interval | None) -> str:
    return "" if gain is None else "{:+.1f} %\n[{:+.1f}, {:+.1f}]".format(*gain)


def _cells(summary: Row) -> dict[str, object]:
    return {
        "mismatched": summary["mismatched_tokens"],
        "speed before": f"{summary['tokens_per_second_before']:.1f}",
        "gain before": _gain(summary["gain_before"]),
        "speed after": f"{summary['tokens_per_second_after']:.1f}",
        "gain after": _gain(summary["gain_after"]),
        "tau before": f"{summary['tau_before']:.3f}",
        "tau after": f"{summary['tau_after']:.3f}",
        "recovery": "" if (queries := summary["recovery_queries"]) is None else queries,
        "training": f"{summary['training_seconds']:.1f} s",
        "its share": f"{100 * summary['training_share']:.1f} %",
        "busy": f"{100 * summary['busy_share']:.0f} %",
        **learning_cells(summary),
        "itl p50": f"{1000 * summary['itl_p50_seconds']:.0f} ms",
        "itl p99": f"{1000 * summary['itl_p99_seconds']:.0f} ms",
        "latency p95": f"{summary['latency_p95_seconds_after']:.2f} s",
    }


def draw(file: Path, windows: Mapping[str, Sequence[Played]], stream: Stream) -> None:
    """Draw tau and speed of all runs by window, where phases begin, and the events of learning."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    taus, speeds = figure.subplots(2, 1, sharex=True)
    for index, (name, mine) in enumerate(windows.items()):
        queries = [window.turn.first + len(window.turn.requests) / 2 for window in mine]
        taus.plot(queries, [window.tau for window in mine], marker=".", color=f"C{index}", label=name)
        speeds.plot(queries, [window.speed for window in mine], marker=".", color=f"C{index}", label=name)
        for window in mine:
            for noted in window.noted:
                if noted.event.kind in _MARKS:
                    taus.scatter([noted.query], [window.tau], marker=_MARKS[noted.event.kind], color=f"C{index}", s=45)
    titles = {taus: f"tau ({', '.join(f'{mark} {kind}' for kind, mark in _MARKS.items())})"}
    for axes, title in {**titles, speeds: "tokens per second of service"}.items():
        axes.set(title=title, xlabel="queries")
        axes.grid(alpha=0.3)
        first = 0
        for phase in stream.phases:
            axes.axvline(first, color="grey", linestyle=":")
            axes.annotate(f" {phase.name}", (first, 0.99), xycoords=("data", "axes fraction"), va="top", fontsize=7)
            first += len(phase.prompts)
    taus.legend(fontsize=8)
    figure.savefig(file, dpi=110)
