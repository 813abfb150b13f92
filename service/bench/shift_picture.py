"""The course of a shift benchmark as a picture: every policy's tau and speed, and both against the plain comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from service.bench.shift_figures import PLAIN, Window, net_speed
from service.bench.shift_learning import Noted
from service.bench.shift_stream import Stream

_MARKS = {"published": ("^", "publish"), "refused": ("x", "refusal"), "rolled_back": ("v", "rollback")}


def draw(
    file: Path, windows: Mapping[str, Sequence[Window]], events: Mapping[str, Sequence[Noted]], stream: Stream
) -> None:
    """Draw all policies' windows, by name; the plain comparison is one of them."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    (taus, speeds), (tau_gains, speed_gains) = figure.subplots(2, 2, sharex=True)
    plain = windows[PLAIN]
    for index, (policy, mine) in enumerate(windows.items()):
        style = {"color": f"C{index}", "label": policy}
        middles = [window.first + window.num_queries / 2 for window in mine]
        taus.plot(middles, [window.tau for window in mine], marker=".", **style)
        speeds.plot(middles, [net_speed(window.played) for window in mine], marker=".", **style)
        if policy != PLAIN:
            ahead = [ours.tau - theirs.tau for ours, theirs in zip(mine, plain, strict=True)]
            tau_gains.plot(middles, ahead, marker=".", **style)
            speed_gains.plot(middles, _percent_faster(mine, plain), marker=".", **style)
            mark(tau_gains, events[policy], mine, ahead, f"C{index}")
    name_axes(
        {
            taus: "tau",
            speeds: "net tokens per second, training included",
            tau_gains: f"tau above {PLAIN}, same queries",
            speed_gains: f"percent more net tokens per second than {PLAIN}, same queries",
        },
        stream,
    )
    taus.legend(fontsize=8)
    explain_marks(tau_gains)
    figure.savefig(file, dpi=110)


def mark(axes: Any, events: Sequence[Noted], windows: Sequence[Window], heights: Sequence[float], color: str) -> None:
    """Each event at its query, at the height of the window it fell into."""
    for kind, (marker, _) in _MARKS.items():
        queries = [noted.query for noted in events if noted.event.kind == kind]
        places = [max(0, sum(window.first < query for window in windows) - 1) for query in queries]
        axes.scatter(queries, [heights[place] for place in places], marker=marker, color=color, s=45, zorder=3)


def name_axes(titles: Mapping[Any, str], stream: Stream) -> None:
    """Title each axes, and show where phases begin."""
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


def explain_marks(axes: Any) -> None:
    """Say below the axes what the marks mean."""
    words = ", ".join(f"{marker} {name}" for marker, name in _MARKS.values())
    axes.set_xlabel(f"queries ({words})")


def _percent_faster(mine: Sequence[Window], plain: Sequence[Window]) -> list[float]:
    pairs = zip(mine, plain, strict=True)
    return [100 * (net_speed(ours.played) / net_speed(theirs.played) - 1) for ours, theirs in pairs]
