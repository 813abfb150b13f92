"""Measured cost corrected while serving: how much slower or faster the machine is now than the table says, by rows.

A start-up table knows neither the day, for clocks change and neighbours come and go, nor all shapes. So

    log seconds = log table(rows, context, sequences) + day + shape[sequences](rows)

The day follows every forward quickly; it is common to all, or what has not been run since a slow minute would be
thought slow for good. Shapes follow slowly, each what was run beside it by as many sequences: were an error of trees of
eight sequences, 16 rows, taken for one of 8 rows or of 16 sequences, a plain step would seem to take longer than it
does, and drafting to gain. A shape is a Gaussian process over the logarithm of rows (Rasmussen, Williams, "Gaussian
processes for machine learning", 2006, section 2.2), so that rows that are seldom run are thought of as those around
them are: a bump that nobody runs into is a trap, for behind it a budget takes any number of nodes to cost nothing.
"""

import math
from functools import lru_cache

import numpy as np

from service.engine.cost import CostTable, FloatArray

_PER_OCTAVE = 2
_POINTS = np.arange(11.0 * _PER_OCTAVE + 1) / _PER_OCTAVE  # shapes at 1, 1.4, 2, 2.8, 4, ... 2048 rows
_DEVIATION = 0.2  # of a shape from the table, as a logarithm
_OCTAVES = 2.0  # over which deviations are alike: they correlate by e^-1
_NOISE = 0.5  # of one forward's logarithm, its share of the day's changes included
_FORGETTING = 0.01  # of what is known, per forward
_PRIOR = _DEVIATION**2 * np.exp(-np.abs(_POINTS[:, None] - _POINTS) / _OCTAVES)
"""These, tried on 2,784 forwards that had been recorded, predict best what was run by others than those they learnt
from: 0.13 to 0.14 off, where points that followed each its own forwards were 0.15 to 0.19."""
_DAY_RATE = 0.1  # of an error, to the day, where the shape is known
_ERROR_RATE = 0.05
_LARGEST_SURPRISE = 0.5  # natural logarithm: one hiccup does not move a prediction by more than a tenth


class OnlineCosts:
    """A cost table, the day, and a shape for each size of batch in powers of two."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._curve = lru_cache(maxsize=2)(table.curve)  # a step asks several times for the same
        self._day = 0.0
        self._shapes: dict[int, _Shape] = {}
        self._newest = _Shape(np.zeros_like(_POINTS))
        self._error = 0.0
        self._observed = 0

    @property
    def error(self) -> float:
        """Running mean of |predicted / measured - 1|."""
        return self._error

    def verify_seconds(self, rows: FloatArray, context: float, sequences: int) -> FloatArray:
        """Corrected seconds of forwards of so many rows, which must rise. # [n] -> [n]"""
        shape = self._shapes.get(sequences.bit_length(), self._newest)
        table = self._table.along(self._curve(context, sequences), rows)
        seconds = table * np.exp(self._day + shape.at(rows))
        # What more rows were seen to take, fewer cannot exceed, even if nobody has run them lately.
        rising: FloatArray = np.minimum.accumulate(seconds[::-1])[::-1]
        return rising

    def learn(self, rows: int, context: float, sequences: int, seconds: float) -> float:
        """Take in what a forward took; returns what had been predicted."""
        predicted = float(self.verify_seconds(np.array([float(rows)]), context, sequences)[0])
        if seconds <= 0.0 or predicted <= 0.0:
            return predicted
        self._note_error(abs(predicted / seconds - 1.0))
        surprise = min(max(math.log(seconds / predicted), -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        self._correct(rows, sequences, surprise)
        return predicted

    def _correct(self, rows: int, sequences: int, surprise: float) -> None:
        """A size of batch begins with the shape of the last one."""
        self._newest = self._shapes.setdefault(sequences.bit_length(), _Shape(self._newest.logs))
        self._day += _DAY_RATE * surprise * self._newest.correct(rows, surprise)

    def _note_error(self, error: float) -> None:
        self._observed += 1
        self._error += max(_ERROR_RATE, 1 / self._observed) * (error - self._error)


class _Shape:
    """The logarithm of what the table's predictions are multiplied by on an ordinary day, and how sure it is.

    Legend: points = numbers of rows at which it is kept; between them it is interpolated.
    """

    def __init__(self, logs: FloatArray) -> None:
        self.logs = logs.copy()  # [points]
        self._covariance = _PRIOR.copy()  # [points, points]

    def at(self, rows: FloatArray) -> FloatArray:
        """# [n] -> [n]"""
        logs: FloatArray = np.interp(np.log2(np.maximum(rows, 1.0)), _POINTS, self.logs)
        return logs

    def correct(self, rows: int, surprise: float) -> float:
        """Take in by how much a forward of so many rows was off; returns what share of it had been known of them."""
        near = np.maximum(0.0, 1.0 - _PER_OCTAVE * np.abs(_POINTS - math.log2(max(rows, 1))))
        shared = self._covariance @ near
        variance = float(near @ shared)
        known = 1.0 - variance / float(near @ _PRIOR @ near)
        gain = shared / (variance + _NOISE**2)
        self.logs += gain * surprise
        learnt = self._covariance - np.outer(gain, shared)
        self._covariance = (1.0 - _FORGETTING) * learnt + _FORGETTING * _PRIOR
        return known
