"""`adaptree bench shift`: load, let the policies take turns, print the table, write and draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from adaptation.config import PolicyName
from service.assembly import Assembly, assemble
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.experiment import Measure, read_sets
from service.bench.shift_figures import Gain, PolicySummary, draw, rows_of, summary_of, windows_of
from service.bench.shift_play import (
    PLAIN,
    Counts,
    Played,
    Stream,
    play_with_bars,
    players_of,
    repeated,
    shifted,
    turns_of,
)
from service.config import ServiceConfig
from service.errors import StartupError

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Which prompts are streamed."""

    before: tuple[Path, ...]
    after: tuple[Path, ...]
    queries: int
    epochs: int | None  # None: a shift in the middle
    turn_queries: int


def run_shift(
    config: ServiceConfig, traffic: Traffic, policies: Sequence[PolicyName], measure: Measure, *, out: Path | None
) -> bool:
    """Let the policies take turns at the stream and report; whether all their texts were the same."""
    refuse_unwritable(out)
    assembly = assemble(config)
    stream = stream_of(assembly, traffic, measure)
    turns = turns_of(stream, traffic.turn_queries)
    with players_of(assembly, {policy: policy for policy in policies}, measure.seed) as players:
        played = play_with_bars(players, {policy: turns for policy in policies}, measure)
    summaries = {name: summary_of(mine, played[PLAIN], stream, seed=measure.seed) for name, mine in played.items()}
    Console().print(table_of(summaries, stream))
    _write(out, assembly, played, summaries, stream)
    return not any(summary.mismatched_tokens for summary in summaries.values())


def policies_of(names: str) -> list[PolicyName]:
    """The policies in a list with commas. Raises StartupError for unknown ones, or where the plain one is missing."""
    asked = list(dict.fromkeys(name.strip() for name in names.split(",")))
    unknown = [name for name in asked if name not in POLICIES]
    if unknown:
        raise StartupError(f"--policies: {', '.join(unknown)} is none of {', '.join(POLICIES)}")
    if PLAIN not in asked:
        raise StartupError(f"--policies: add {PLAIN}, all others are compared with it")
    return [name for name in POLICIES if name in asked]


def stream_of(assembly: Assembly, traffic: Traffic, measure: Measure) -> Stream:
    """The prompts, as tokens and in their order. Raises StartupError."""
    before = read_sets(assembly, traffic.before, None, measure.max_tokens)
    after = read_sets(assembly, traffic.after, None, measure.max_tokens)
    if traffic.epochs is not None:
        return repeated([*before, *after], traffic.queries, traffic.epochs, measure.seed)
    return shifted(before, after, traffic.queries, measure.seed)


def _write(
    out: Path | None,
    assembly: Assembly,
    played: Mapping[str, Sequence[Played]],
    summaries: Mapping[str, PolicySummary],
    stream: Stream,
) -> None:
    if out is None:
        return
    windows = {name: windows_of(mine) for name, mine in played.items()}
    rows = [row for name, mine in windows.items() for row in rows_of(name, mine, stream)]
    summary = {
        "queries": stream.num_queries,
        "new_from": stream.new_from,
        "mismatched_tokens": sum(mine.mismatched_tokens for mine in summaries.values()),
        "policies": {name: mine.as_json() for name, mine in summaries.items()},
    }
    write_report(out, conditions_of(assembly), rows, summary)
    draw(out.with_suffix(".png"), windows, {name: mine.events for name, mine in summaries.items()}, stream)


def table_of(summaries: Mapping[str, PolicySummary], stream: Stream) -> Table:
    """One column per policy."""
    table = columns_table("", {name: _cells(summary) for name, summary in summaries.items()}, _SECTION_ENDS)
    table.caption = (
        f"before: {stream.phases[0].name}; after: {stream.phases[-1].name}; net: tokens per second, training included; "
        f"engine: without waiting for it; gain: of net over {PLAIN} on the same queries, with what holds 95 % of "
        "resampled turns; recovery: queries until 90 % of the final gain of tau"
    )
    return table


def columns_table(corner: str, columns: Mapping[str, Mapping[str, str]], section_ends: Sequence[str]) -> Table:
    """One column for each name, whose cells have the same titles."""
    table = Table(corner, *columns)
    for title in next(iter(columns.values())):
        table.add_row(title, *(column[title] for column in columns.values()), end_section=title in section_ends)
    return table


def learning_cells(counts: Counts) -> dict[str, str]:
    """What learning did."""
    return {
        "updates, head": str(counts.updates_head),
        "updates, full": str(counts.updates_full),
        "publishes": str(counts.publishes),
        "refusals": str(counts.refusals),
        "rollbacks": str(counts.rollbacks),
    }


_SECTION_ENDS = ("mismatched", "engine after", "recovery", "rollbacks")


def _cells(summary: PolicySummary) -> dict[str, str]:
    return {
        "mismatched": str(summary.mismatched_tokens),
        "net before": f"{summary.net_tokens_per_second_before:.1f}",
        "gain before": _gain(summary.net_gain_before),
        "net after": f"{summary.net_tokens_per_second_after:.1f}",
        "gain after": _gain(summary.net_gain_after),
        "engine before": f"{summary.engine_tokens_per_second_before:.1f}",
        "engine after": f"{summary.engine_tokens_per_second_after:.1f}",
        "tau before": f"{summary.tau_before:.3f}",
        "tau after": f"{summary.tau_after:.3f}",
        "recovery": "" if summary.recovery_queries is None else str(summary.recovery_queries),
        "training": f"{summary.counts.training_seconds:.1f} s",
        "its share": f"{100 * summary.training_share:.1f} %",
        "waited for": f"{summary.waited_seconds:.1f} s",
        **learning_cells(summary.counts),
        "itl p50": f"{1000 * summary.itl_p50_seconds:.0f} ms",
        "itl p99": f"{1000 * summary.itl_p99_seconds:.0f} ms",
    }


def _gain(gain: Gain | None) -> str:
    return "" if gain is None else f"{gain.percent:+.1f} %\n[{gain.low:+.1f}, {gain.high:+.1f}]"
