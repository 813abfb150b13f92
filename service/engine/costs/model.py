"""What verifying and drafting cost: a table measured at start-up, and how far the machine is from it now.

Tables live on the host, in numpy: a prediction is a few microseconds there and a dozen launches on a device.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Value = TypeVar("Value", float, FloatArray)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Seconds of one forward on a grid; between its points cost is interpolated, beyond them extended linearly."""

    sequences: FloatArray  # [sequence points], rising
    contexts: FloatArray  # [context points], rising
    rows: FloatArray  # [row points], rising
    seconds: FloatArray  # [sequence points, context points, row points]

    def verify_seconds(self, rows: FloatArray, context: float, sequences: int = 1) -> FloatArray:
        """Predicted seconds of forwards of so many rows, at a mean context length per sequence. # [n] -> [n]"""
        return along(self.rows, self.curve(context, sequences), rows)

    def curve(self, context: float, sequences: int) -> FloatArray:
        """Seconds at the row points. # -> [row points]"""
        return self.at_context(context, self.by_context(sequences))

    def by_context(self, sequences: int) -> FloatArray:
        """Seconds at the points. # -> [context points, row points]"""
        # What is extended beyond the last point can fall, in the end below zero.
        by_context: FloatArray = np.maximum.accumulate(_between(self.sequences, sequences, self.seconds), axis=0)
        return by_context

    def at_context(self, context: float, by_context: FloatArray) -> FloatArray:
        """The same at one context. # -> [row points]"""
        curve: FloatArray = np.maximum.accumulate(_between(self.contexts, context, by_context))
        return curve


def rising(seconds: FloatArray, axis: int = 0) -> FloatArray:
    """Each value at most as large as those after it: noise only adds, so nothing takes longer than more of it did."""
    backwards = (*(slice(None),) * axis, slice(None, None, -1))
    made: FloatArray = np.minimum.accumulate(seconds[backwards], axis=axis)[backwards]
    return made


def along(points: FloatArray, curve: FloatArray, values: FloatArray) -> FloatArray:
    """The curve at these values, which must rise. # points, curve [points], values [n] -> [n]"""
    inside: FloatArray = np.interp(values, points, curve)
    if points.shape[0] == 1 or values[-1] <= points[-1]:
        return inside
    slope = float((curve[-1] - curve[-2]) / (points[-1] - points[-2]))
    beyond: FloatArray = np.maximum(0.0, values - points[-1])
    return inside + slope * beyond


def _between(points: FloatArray, value: float, values: FloatArray) -> FloatArray:
    """Values interpolated along their first axis. # values [points, ...] -> [...]"""
    if points.shape[0] == 1:
        only: FloatArray = values[0]
        return only
    above, share = _place(points, value)
    between: FloatArray = values[above - 1] * (1 - share) + values[above] * share
    return between


def _place(points: FloatArray | list[float], value: float) -> tuple[int, float]:
    """The point above, and the share of the way to it from the one before: beyond the last one more than 1."""
    above = min(max(bisect_left(points, value), 1), len(points) - 1)
    return above, max(0.0, float((value - points[above - 1]) / (points[above] - points[above - 1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """Seconds of drafting one tree for each sequence of a batch."""

    batches: FloatArray  # [batch points], rising
    seconds: FloatArray  # [batch points]

    def draft_seconds(self, batch: int) -> float:
        return float(np.interp(batch, self.batches, self.seconds))


FREE = DraftCosts(batches=np.ones(1), seconds=np.zeros(1))
"""Of a drafter that was not measured."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured at start-up."""

    verify: CostTable
    drafts: DraftCosts
    gains_file: Path | None = None  # where what drafting gained is kept from start to start


_PER_OCTAVE = 2
_POINTS = np.arange(11.0 * _PER_OCTAVE + 1) / _PER_OCTAVE  # shapes at 1, 1.4, 2, 2.8, 4, ... 2048 rows
_DEVIATION = 0.2  # of a shape from the table, as a logarithm
_OCTAVES = 2.0  # over which deviations are alike: they correlate by e^-1
_NOISE = 0.5  # of one forward's logarithm, its share of the day's changes included
_FORGETTING = 0.01  # of what is known, per forward
_PRIOR = _DEVIATION**2 * np.exp(-np.abs(_POINTS[:, None] - _POINTS) / _OCTAVES)
_DAY_RATE = 0.1  # of an error, to the day, where the shape is known
_MOST_SURPRISE = 0.5  # natural logarithm: one hiccup does not move a prediction by more than a tenth


class OnlineCosts:
    """A cost table corrected while serving, by rows and by the size of the batch in powers of two:

        log seconds = log table(rows, context, sequences) + day + shape[sequences](rows)

    The day follows every forward quickly and is common to all; shapes follow slowly, each by the batches of its size
    alone. On 2,784 recorded forwards predictions are 0.13 to 0.14 off, by independent points 0.15 to 0.19.
    """

    def __init__(self, table: CostTable) -> None:
        self._table, self._rows = table, table.rows.tolist()  # planned transfer: numpy, on the host
        self._by_context = cache(table.by_context)
        self._curve = lru_cache(maxsize=2)(self._find_curve)  # a step asks several times for the same
        self._day = 0.0
        self._shapes: dict[int, _Shape] = {}
        self._newest = _Shape(np.zeros_like(_POINTS))
        self._known: dict[tuple[int, float, int], float] = {}  # of forwards, until more is learnt

    def verify_seconds(self, rows: FloatArray, context: float, sequences: int) -> FloatArray:
        """Corrected seconds of forwards of so many rows, at least one, which must rise. # [n] -> [n]"""
        table = along(self._table.rows, self._curve(context, sequences), rows)
        # What more rows were seen to take, fewer cannot exceed, even if nobody has run them lately.
        return rising(table * np.exp(self._day + self._shape(sequences).at(rows)))

    def forward_seconds(self, rows: int, context: float, sequences: int) -> float:
        """The same of one forward."""
        key = rows, context, sequences
        found = self._known.get(key)
        if found is None:
            curve = self._curve(context, sequences)
            above, share = _place(self._rows, rows) if len(curve) > 1 else (0, 1.0)
            table = float(curve[above - 1]) * (1.0 - share) + float(curve[above]) * share
            found = self._known[key] = table * math.exp(self._day + self._shape(sequences).at_one(rows))
        return found

    def learn(self, rows: int, context: float, sequences: int, seconds: float) -> float:
        """Take in what a forward took; returns what had been predicted."""
        predicted = self.forward_seconds(rows, context, sequences)
        self._known.clear()
        if seconds <= 0.0 or predicted <= 0.0:
            return predicted
        surprise = min(max(math.log(seconds / predicted), -_MOST_SURPRISE), _MOST_SURPRISE)
        # A size of batch begins with the shape of the last one.
        self._newest = self._shapes.setdefault(sequences.bit_length(), self._shape(sequences))
        self._day += _DAY_RATE * surprise * self._newest.correct(rows, surprise)
        return predicted

    def _find_curve(self, context: float, sequences: int) -> FloatArray:
        return self._table.at_context(context, self._by_context(sequences))

    def _shape(self, sequences: int) -> "_Shape":
        return self._shapes.get(sequences.bit_length()) or _Shape(self._newest.logs)


class _Shape:
    """The logarithm of what the table's predictions are multiplied by on an ordinary day, and how sure it is: a
    Gaussian process over the logarithm of rows (Rasmussen, Williams, "Gaussian processes for machine learning", 2006,
    section 2.2).

    Legend: points = numbers of rows at which it is kept; between them it is interpolated.
    """

    def __init__(self, logs: FloatArray) -> None:
        self.logs = logs.copy()  # [points]
        self._learnt = np.zeros_like(_PRIOR)  # [points, points], by which it is surer than the prior: less covariance

    def at(self, rows: FloatArray) -> FloatArray:
        """# [n] -> [n]"""
        logs: FloatArray = np.interp(np.log2(rows), _POINTS, self.logs)
        return logs

    def at_one(self, rows: int) -> float:
        near = _near(rows)
        return near.mean(float(self.logs[near.point]), float(self.logs[near.point + 1]))

    def correct(self, rows: int, surprise: float) -> float:
        """Take in by how much a forward of so many rows was off; returns what share of it had been known of them."""
        near = _near(rows)
        shared = near.prior - near.mean(self._learnt[near.point], self._learnt[near.point + 1])
        variance = near.mean(float(shared[near.point]), float(shared[near.point + 1]))
        gain = shared * (1.0 / (variance + _NOISE**2))
        self._learnt += np.multiply.outer(gain, shared)
        self._learnt *= 1.0 - _FORGETTING
        gain *= surprise
        self.logs += gain
        return 1.0 - variance / near.variance


class _Near(NamedTuple):
    """Where a number of rows lies between two points."""

    point: int  # the one before
    share: float  # of the way to the next one
    prior: FloatArray  # [points] covariance with what lies there, and its variance, before anything is learnt
    variance: float

    def mean(self, before: Value, after: Value) -> Value:
        """Interpolated."""
        return before * (1.0 - self.share) + after * self.share


@lru_cache(maxsize=4096)
def _near(rows: int) -> _Near:
    place = min(math.log2(max(rows, 1)), float(_POINTS[-1]))  # more rows count as the most that are kept
    above, share = _place(_POINTS, place)
    weights = np.zeros_like(_POINTS)
    weights[above - 1 : above + 1] = 1.0 - share, share
    prior = _PRIOR @ weights
    return _Near(above - 1, share, prior, float(weights @ prior))


_DRAFT_RATE = 0.1
_MOST_TIMES = 4.0  # what was expected: one hiccup must not pass for the price of drafting


class OnlineDraftCosts:
    """Drafting seconds as they are now, by powers of two of the batch; starts from what was measured."""

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        self._seconds: dict[int, float] = {}

    def draft_seconds(self, batch: int) -> float:
        known = self._seconds.get(batch.bit_length())
        return self._costs.draft_seconds(batch) if known is None else known

    def learn(self, batch: int, seconds: float) -> float:
        """Take in what drafting took; returns the same without what a hiccup added."""
        expected = self.draft_seconds(batch)
        likely = min(seconds, _MOST_TIMES * expected) if expected > 0 else seconds
        self._seconds[batch.bit_length()] = expected + _DRAFT_RATE * (likely - expected) if expected > 0 else likely
        return likely
