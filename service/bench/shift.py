"""`adaptree bench shift`: what the turns of all policies come to, as figures, a table and a picture."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from adaptation.config import PolicyName
from service.bench.experiment import (
    Measure,
    Row,
    conclude,
    mismatches,
    paired_bootstrap,
    percentile,
    prepare,
    read_sets,
)
from service.bench.shift_play import (
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
from service.config import ServiceConfig
from service.errors import StartupError

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

_RECOVERED = 0.9
_REPORTED = ("training_seconds", "updates_head", "updates_full", "publishes", "refusals", "rollbacks")


def run_shift(
    config: ServiceConfig,
    before: Sequence[Path],
    after: Sequence[Path],
    policies: Sequence[PolicyName],
    measure: Measure,
    *,
    queries: int,
    epochs: int | None,
    turn_queries: int,
    pause_seconds: float,
    keep: Path | None = None,
    out: Path | None,
) -> bool:
    """Let the policies take turns at the stream, a shift unless there are epochs; whether all texts were the same."""
    if not after and epochs is None:
        raise StartupError("--after says what traffic changes to: give it, or --epochs for a stream that does not")
    assembly = prepare(config, out)
    old, new = (read_sets(assembly, files, None, measure.max_tokens) for files in (before, after))
    if epochs is None:
        stream = shifted(old, new, queries, measure.seed)
    else:
        stream = repeated([*old, *new], queries, epochs, measure.seed)
    turns = turns_of(stream, turn_queries, measure)
    with players_of(assembly, {policy: policy for policy in policies}, measure.seed, keep) as players:
        played = play_all(players, dict.fromkeys(policies, turns), measure, pause_seconds)
    summaries = {name: summary_of(mine, played[PLAIN], stream, seed=measure.seed) for name, mine in played.items()}
    windows = {name: windows_of(mine) for name, mine in played.items()}
    if out is not None:
        draw(out.with_suffix(".png"), windows, stream)
    summary = {
        "queries": stream.num_queries,
        "new_from": stream.new_from,
        "mismatched_tokens": sum(summary["mismatched_tokens"] for summary in summaries.values()),
        "policies": summaries,
    }
    rows = [row for name, mine in windows.items() for row in rows_of(name, mine, stream)]
    return conclude(assembly, out, rows, summary, table_of(summaries, stream))


def policies_of(names: str) -> list[PolicyName]:
    """The policies in a list with commas. Raises StartupError for unknown ones, or where the plain one is missing."""
    asked = list(dict.fromkeys(name.strip() for name in names.split(",")))
    unknown = [name for name in asked if name not in POLICIES]
    if unknown:
        raise StartupError(f"--policies: {', '.join(unknown)} is none of {', '.join(POLICIES)}")
    if PLAIN not in asked:
        raise StartupError(f"--policies: add {PLAIN}, all others are compared with it")
    return [name for name in POLICIES if name in asked]


@dataclass(frozen=True, slots=True)
class Gain:
    """Percent more tokens per second than another, with what holds 95 % of resampled turns."""

    percent: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.percent:+.1f} %\n[{self.low:+.1f}, {self.high:+.1f}]"


def rows_of(policy: str, windows: Sequence[Played], stream: Stream) -> list[Row]:
    return [
        {
            "policy": policy,
            "window": window.turn.window,
            "phase": stream.phases[window.turn.phase].name,
            "first_query": window.turn.first,
            "queries": len(window.turn.requests),
            "tau": window.tau,
            "tokens_per_second": window.net_speed,  # all seconds of its turns, training included
            "engine_tokens_per_second": window.engine_speed,  # without waiting until training stood still
            **{name: window.counts[name] for name in _REPORTED},
        }
        for window in windows
    ]


def summary_of(played: Sequence[Played], plain: Sequence[Played], stream: Stream, *, seed: int) -> Row:
    """One policy against the plain comparison, which may be its own turns; before is the first phase, after the last.

    Gains are None for the plain comparison itself, `recovery_queries` where nothing was gained or published.
    """
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
        "net_tokens_per_second_before": before.net_speed,
        "net_tokens_per_second_after": after.net_speed,
        "engine_tokens_per_second_before": before.engine_speed,
        "engine_tokens_per_second_after": after.engine_speed,
        "net_gain_before": net_gain(old, plain_old, seed=seed) if compares else None,
        "net_gain_after": net_gain(new, plain_new, seed=seed) if compares else None,
        "tau_before": before.tau,
        "tau_after": after.tau,
        # from the first to the last windows with something new, above the plain comparison's
        "final_tau_gain": final_gain if compares else None,
        "recovery_queries": recovery if whole.counts["publishes"] else None,
        "mismatched_tokens": mismatches([one.run for one in plain], [one.run for one in played]),
        **whole.counts,
        "training_share": whole.counts["training_seconds"] / whole.net_seconds,  # of all net seconds
        "waited_seconds": whole.net_seconds - whole.run.seconds,  # between a turn's last answer and its end
        "itl_p50_seconds": percentile(gaps, 50, method="linear"),
        "itl_p99_seconds": percentile(gaps, 99, method="linear"),
        "events": [json_event(noted) for noted in whole.noted],
    }


def net_gain(mine: Sequence[Played], plain: Sequence[Played], *, seed: int) -> Gain:
    """How much faster, training included."""
    ratio = paired_ratio(mine, plain, lambda one: (one.run.num_tokens, one.net_seconds), seed=seed)
    return Gain(*(100 * (value - 1) for value in ratio))


def paired_ratio(
    mine: Sequence[Played], plain: Sequence[Played], rate: Callable[[Played], tuple[float, float]], *, seed: int
) -> tuple[float, float, float]:
    """One rate, of (tokens, units) in each turn, by another on the same queries; and what holds 95 % of it."""

    def ratio(sums: np.ndarray) -> np.ndarray:  # [4, ...] -> [...]
        tokens, units, plain_tokens, plain_units = sums
        found: np.ndarray = tokens / units * plain_units / plain_tokens
        return found

    columns = np.array([(*rate(ours), *rate(theirs)) for ours, theirs in zip(mine, plain, strict=True)], float).T
    return paired_bootstrap(ratio, columns, seed=seed)


def recovery_of(mine: Sequence[Played], plain: Sequence[Played]) -> tuple[float, int | None]:
    """Mean of tau above plain in the last quarter of the windows minus the first, and queries until 90 % of that."""
    ahead = [ours.tau - theirs.tau for ours, theirs in zip(mine, plain, strict=True)]
    final = fmean(ahead[-max(1, len(ahead) // 4) :]) - ahead[0]
    if final <= 0:
        return final, None
    reached = next(place for place, value in enumerate(ahead) if value - ahead[0] >= _RECOVERED * final)
    return final, sum(len(window.turn.requests) for window in mine[: reached + 1])


def json_event(noted: Noted) -> dict[str, object]:
    """JSON knows no NaN, which is what a score without texts is."""
    event = noted.event
    numbers = {name: value if math.isfinite(value) else None for name, value in event.numbers.items()}
    said = {"kind": event.kind, "version": event.version, "reason": event.reason}
    return {"query": noted.query, **said, "numbers": numbers}


def table_of(summaries: Mapping[str, Row], stream: Stream) -> Table:
    """One column per policy."""
    table = columns_table("", {name: _cells(summary) for name, summary in summaries.items()}, _SECTION_ENDS)
    table.caption = (
        f"before: {stream.phases[0].name}; after: {stream.phases[-1].name}; net: tokens per second, training included; "
        f"engine: without waiting for it; gain: of net over {PLAIN} on the same queries, with what holds 95 % of "
        "resampled turns; recovery: queries until 90 % of the final gain of tau"
    )
    return table


def columns_table(corner: str, columns: Mapping[str, Mapping[str, object]], section_ends: Sequence[str]) -> Table:
    """One column for each name, whose cells have the same titles."""
    table = Table(corner, *columns)
    for title in next(iter(columns.values())):
        table.add_row(title, *(str(column[title]) for column in columns.values()), end_section=title in section_ends)
    return table


def learning_cells(counts: Counts) -> dict[str, object]:
    return {name.replace("_", ", "): counts[name] for name in _REPORTED[1:]}


_SECTION_ENDS = ("mismatched", "engine after", "recovery", "rollbacks")


def _cells(summary: Row) -> dict[str, object]:
    return {
        "mismatched": summary["mismatched_tokens"],
        "net before": f"{summary['net_tokens_per_second_before']:.1f}",
        "gain before": summary["net_gain_before"] or "",
        "net after": f"{summary['net_tokens_per_second_after']:.1f}",
        "gain after": summary["net_gain_after"] or "",
        "engine before": f"{summary['engine_tokens_per_second_before']:.1f}",
        "engine after": f"{summary['engine_tokens_per_second_after']:.1f}",
        "tau before": f"{summary['tau_before']:.3f}",
        "tau after": f"{summary['tau_after']:.3f}",
        "recovery": "" if (queries := summary["recovery_queries"]) is None else queries,
        "training": f"{summary['training_seconds']:.1f} s",
        "its share": f"{100 * summary['training_share']:.1f} %",
        "waited for": f"{summary['waited_seconds']:.1f} s",
        **learning_cells(summary),
        "itl p50": f"{1000 * summary['itl_p50_seconds']:.0f} ms",
        "itl p99": f"{1000 * summary['itl_p99_seconds']:.0f} ms",
    }


_MARKS = {"published": ("^", "publish"), "refused": ("x", "refusal"), "rolled_back": ("v", "rollback")}


def draw(file: Path, windows: Mapping[str, Sequence[Played]], stream: Stream) -> None:
    """Draw all policies' windows, by name; the plain comparison is one of them."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    (taus, speeds), (tau_gains, speed_gains) = figure.subplots(2, 2, sharex=True)
    for index, (policy, mine) in enumerate(windows.items()):
        style = {"color": f"C{index}", "label": policy, "marker": "."}
        places = middles(mine)
        taus.plot(places, [window.tau for window in mine], **style)
        speeds.plot(places, [window.net_speed for window in mine], **style)
        if policy != PLAIN:
            pairs = list(zip(mine, windows[PLAIN], strict=True))
            ahead = [ours.tau - theirs.tau for ours, theirs in pairs]
            tau_gains.plot(places, ahead, **style)
            speed_gains.plot(places, [100 * (ours.net_speed / theirs.net_speed - 1) for ours, theirs in pairs], **style)
            mark(tau_gains, mine, ahead, f"C{index}")
    titles = {
        taus: "tau",
        speeds: "net tokens per second, training included",
        tau_gains: f"tau above {PLAIN}, same queries",
        speed_gains: f"percent more net tokens per second than {PLAIN}, same queries",
    }
    name_axes(titles, stream, marked=tau_gains)
    taus.legend(fontsize=8)
    figure.savefig(file, dpi=110)


def middles(windows: Sequence[Played]) -> list[float]:
    return [window.turn.first + len(window.turn.requests) / 2 for window in windows]


def mark(axes: Any, windows: Sequence[Played], heights: Sequence[float], color: str) -> None:
    """Each event at its query, at the height of the window it fell into."""
    for window, height in zip(windows, heights, strict=True):
        for noted in window.noted:
            if noted.event.kind in _MARKS:
                marker = _MARKS[noted.event.kind][0]
                axes.scatter([noted.query], [height], marker=marker, color=color, s=45, zorder=3)


def name_axes(titles: Mapping[Any, str], stream: Stream, *, marked: Any) -> None:
    """Title each axes, show where phases begin, and say below one of them what its marks mean."""
    for axes, title in titles.items():
        axes.set_title(title)
        axes.set_xlabel("queries")
        axes.grid(alpha=0.3)
        first = 0
        for phase in stream.phases:
            axes.axvline(first, color="grey", linestyle=":")
            place = {"xycoords": ("data", "axes fraction"), "va": "top"}
            axes.annotate(f" {phase.name}", (first, 0.99), fontsize=7, color="grey", **place)
            first += len(phase.prompts)
    marked.set_xlabel(f"queries ({', '.join(f'{marker} {name}' for marker, name in _MARKS.values())})")
