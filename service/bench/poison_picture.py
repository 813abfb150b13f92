"""The course of a poisoning benchmark as a picture: honest clients' tau, its ratios, and who attacked when."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from service.bench.poison_figures import ANCHOR, ASKED_RATIO, ATTACKED, STRETCH, UNATTACKED, stretches
from service.bench.shift_figures import Window
from service.bench.shift_learning import Noted
from service.bench.shift_picture import explain_marks, mark, name_axes
from service.bench.shift_stream import Stream


def draw(
    file: Path,
    windows: Mapping[str, Sequence[Window]],
    events: Mapping[str, Sequence[Noted]],
    hostile: Mapping[str, Mapping[int, int]],
    stream: Stream,
) -> None:
    """Draw the windows of all runs; `hostile` has each hostile client's queries by window."""
    figure = Figure(figsize=(11, 10), layout="constrained")
    taus, ratios, attacks = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.4))
    for index, (run, mine) in enumerate(windows.items()):
        heights = [window.tau for window in mine]
        taus.plot(_middles(mine), heights, marker=".", color=f"C{index}", label=run)
        mark(taus, events[run], mine, heights, f"C{index}")
    _ratios(ratios, windows)
    _attacks(attacks, windows[ATTACKED], hostile)
    titles = {
        taus: "tau of honest clients",
        ratios: f"tau by another run's on the same queries; over {STRETCH} windows where the anchor's",
        attacks: "queries of hostile clients in a window",
    }
    name_axes(titles, stream)
    for axes in (taus, ratios, attacks):
        axes.legend(fontsize=8)
    explain_marks(taus)
    figure.savefig(file, dpi=110)


def _ratios(axes: Any, windows: Mapping[str, Sequence[Window]]) -> None:
    attacked, unattacked = windows[ATTACKED], windows[UNATTACKED]
    middles = _middles(attacked)
    for index, run in enumerate((ATTACKED, UNATTACKED)):
        found = stretches(windows[run], windows[ANCHOR])
        # A stretch stands where its middle window does.
        places = middles[(len(middles) - len(found)) // 2 :][: len(found)]
        ratios = [stretch.ratio for stretch in found]
        axes.plot(places, ratios, marker=".", color=f"C{index}", label=f"{run} / {ANCHOR}")
    ratios = [mine.tau / theirs.tau for mine, theirs in zip(attacked, unattacked, strict=True)]
    axes.plot(middles, ratios, marker=".", color="C3", label=f"{ATTACKED} / {UNATTACKED}")
    for height in (1.0, ASKED_RATIO):
        axes.axhline(height, color="grey", linewidth=0.8)


def _attacks(axes: Any, windows: Sequence[Window], hostile: Mapping[str, Mapping[int, int]]) -> None:
    width = 0.8 * min(window.num_queries for window in windows)
    below = [0] * len(windows)
    for client, by_window in hostile.items():
        heights = [by_window[window.number] for window in windows]
        axes.bar(_middles(windows), heights, width, bottom=below, label=client)
        below = [height + more for height, more in zip(below, heights, strict=True)]


def _middles(windows: Sequence[Window]) -> list[float]:
    return [window.first + window.num_queries / 2 for window in windows]
