"""What a verify costs: seconds by rows, context length and number of sequences, measured on the running machine.

Tables live on the host, in numpy: a prediction is a few microseconds there and a dozen launches on a device. Knows
neither budgets nor how a forward is run.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

FloatArray = npt.NDArray[np.float64]

_ENOUGH_SECONDS = 0.25
"""A point that has been timed for so long is not timed again: large models would take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Seconds of one forward on a grid; between its points cost is interpolated, beyond them extended linearly."""

    sequences: FloatArray  # [sequence points], rising
    contexts: FloatArray  # [context points], rising
    rows: FloatArray  # [row points], rising
    seconds: FloatArray  # [sequence points, context points, row points]

    def verify_seconds(self, rows: FloatArray, context: float, sequences: int = 1) -> FloatArray:
        """Predicted seconds of forwards of so many rows, at a mean context length per sequence. # [n] -> [n]"""
        return self.along(self.curve(context, sequences), rows)

    def curve(self, context: float, sequences: int) -> FloatArray:
        """Seconds at the row points. # -> [row points]"""
        # What is extended beyond the last point can fall, in the end below zero.
        by_context = np.maximum.accumulate(_between(self.sequences, sequences, self.seconds), axis=0)
        rising: FloatArray = np.maximum.accumulate(_between(self.contexts, context, by_context))
        return rising

    def along(self, curve: FloatArray, rows: FloatArray) -> FloatArray:
        """What a curve says of so many rows. # curve [row points], rows [n] -> [n]"""
        return _along(self.rows, curve, rows)

    def to(self, device: torch.device) -> "CostTable":
        """Itself: predictions are made on the host, whatever the device."""
        return self


def _between(points: FloatArray, value: float, values: FloatArray) -> FloatArray:
    """Values interpolated along their first axis. # values [points, ...] -> [...]"""
    if points.shape[0] == 1:
        only: FloatArray = values[0]
        return only
    above = min(max(int(np.searchsorted(points, value)), 1), points.shape[0] - 1)
    share = max(0.0, float((value - points[above - 1]) / (points[above] - points[above - 1])))
    between: FloatArray = values[above - 1] * (1 - share) + values[above] * share
    return between


def _along(points: FloatArray, curve: FloatArray, values: FloatArray) -> FloatArray:
    """The curve at these values. # points, curve [points], values [n] -> [n]"""
    inside: FloatArray = np.interp(values, points, curve)
    if points.shape[0] == 1:
        return inside
    slope = float((curve[-1] - curve[-2]) / (points[-1] - points[-2]))
    beyond: FloatArray = np.maximum(0.0, values - points[-1])
    return inside + slope * beyond


@dataclass(frozen=True, slots=True)
class Point:
    """A forward to be timed."""

    sequences: int
    context: int
    rows: int


def measure_grid(
    run: Callable[[Point], None],
    sequences: Sequence[int],
    contexts: Sequence[int],
    rows: Sequence[int],
    *,
    most_rows: Callable[[int], int],
    repeats: int = 3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CostTable:
    """Time `run` where so many sequences can have so many rows: at least one each, at most `most_rows(sequences)`.

    The longest context is timed at the fewest and the most rows only, for what a context adds is linear in rows.
    `progress` hears how many points are done, of how many.
    """
    lines = [_Line(count, [r for r in rows if count <= r <= most_rows(count)] or [count]) for count in sequences]
    points = [point for line in lines for point in line.points(contexts)]
    seconds: dict[Point, float] = {}
    for done, point in enumerate(points):
        progress(done, len(points))
        seconds[point] = _best_seconds(partial(run, point), repeats)
    progress(len(points), len(points))
    grid = np.array([[line.curve(seconds, context, contexts[0], rows) for context in contexts] for line in lines])
    return table_of(sequences, contexts, rows, grid)


def table_of(sequences: Sequence[int], contexts: Sequence[int], rows: Sequence[int], seconds: FloatArray) -> CostTable:
    """A table made monotonic along every axis: noise only adds, so no forward takes longer than a larger one did."""
    for axis in range(3):
        seconds = _rising(seconds, axis)
    return CostTable(
        sequences=np.asarray(sequences, dtype=np.float64),
        contexts=np.asarray(contexts, dtype=np.float64),
        rows=np.asarray(rows, dtype=np.float64),
        seconds=seconds,
    )


def measure(
    run: Callable[[int, int], None], rows: Sequence[int], contexts: Sequence[int], *, repeats: int = 3
) -> CostTable:
    """Time `run(rows, context)` of one sequence over a grid."""
    seconds = [[_best_seconds(partial(run, count, context), repeats) for count in rows] for context in contexts]
    return table_of([1], contexts, rows, np.array([seconds]))


@dataclass(frozen=True, slots=True)
class _Line:
    """The row counts timed for one number of sequences."""

    sequences: int
    rows: list[int]

    def points(self, contexts: Sequence[int]) -> list[Point]:
        few = sorted({self.rows[0], self.rows[-1]})
        return [
            Point(self.sequences, context, rows)
            for number, context in enumerate(contexts)
            for rows in (self.rows if number == 0 else few)
        ]

    def curve(self, seconds: dict[Point, float], context: int, first: int, rows: Sequence[int]) -> FloatArray:
        """Seconds at every row point: as measured, or as at the first context plus what this one adds; rows that
        this many sequences cannot have count as the nearest that they can. # -> [row points]"""
        base = np.array([seconds[Point(self.sequences, first, r)] for r in self.rows])
        ends = [self.rows[0], self.rows[-1]]
        more = [seconds[Point(self.sequences, context, r)] - seconds[Point(self.sequences, first, r)] for r in ends]
        curve = _rising(base + np.interp(self.rows, ends, more), axis=0)  # or noise would be extended below zero
        return _along(np.array(self.rows, dtype=np.float64), curve, np.maximum(rows, self.rows[0]).astype(np.float64))


def _rising(seconds: FloatArray, axis: int) -> FloatArray:
    """Each value at most as large as those after it."""
    rising: FloatArray = np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis=axis), axis)
    return rising


def _best_seconds(run: Callable[[], None], repeats: int) -> float:
    """The fastest of a few runs: whatever else the machine does, and a first call's allocations, can only add."""
    seconds = [_seconds(run)]
    while len(seconds) < repeats and sum(seconds) < _ENOUGH_SECONDS:
        seconds.append(_seconds(run))
    return min(seconds)


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
