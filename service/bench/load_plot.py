"""Throughput and chosen budget against concurrency, as a PNG by matplotlib. Knows nothing of how rows came about."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from service.bench.load_rows import ADAPTIVE, LoadRow


def plot_load(rows: Sequence[LoadRow], file: Path, *, title: str) -> None:
    """One line per policy; the adaptive one's budget below."""
    figure = Figure(figsize=(7.5, 7.0))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for policy in dict.fromkeys(row.policy for row in rows):
        mine = [row for row in rows if row.policy == policy]
        width = 2.5 if policy == ADAPTIVE else 1.2
        places = [row.concurrency for row in mine]
        above.plot(places, [row.tokens_per_second for row in mine], marker="o", linewidth=width, label=policy)
        below.plot(places, [row.mean_budget for row in mine], marker="o", linewidth=width, label=policy)
    above.set_title(title)
    above.set_ylabel("tokens per second")
    above.legend()
    below.set_xscale("log", base=2)
    below.set_xlabel("concurrency")
    below.set_ylabel("nodes per sequence and step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
