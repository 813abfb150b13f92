"""Measured cost corrected while serving: how much slower or faster the machine is now than the table says, by rows.

A start-up table knows neither the day, for clocks change and neighbours come and go, nor all shapes. So

    log seconds = log table(rows, context, sequences) + day + shape[sequences](rows)

The day follows every forward quickly; it is common to all, or what has not been run since a slow minute would be
thought slow for good. Shapes follow slowly, each what was run beside it by as many sequences: were an error of trees of
eight sequences, 16 rows, taken for one of 8 rows or of 16 sequences, a plain step would seem to take longer than it
does, and drafting to gain. They are kept at every half power of two of rows and interpolated, so that the corrected
curve has no jumps that a budget could fall for.
"""

import math

import numpy as np

from service.engine.cost import CostTable, FloatArray

_PER_OCTAVE = 2
_POINTS = np.arange(11.0 * _PER_OCTAVE + 1) / _PER_OCTAVE  # shapes at 1, 1.4, 2, 2.8, 4, ... 2048 rows
_DAY_RATE = 0.1  # of an error, to the day, where the shape is known
_SHAPE_RATE = 0.05  # to the points between which the rows lie, once many errors are known
_TRUSTED = 4.0  # forwards after which half of an error is taken for the day's
_ERROR_RATE = 0.05
_LARGEST_SURPRISE = 0.5  # natural logarithm: once a shape is known, one hiccup does not move it by more than a tenth


class OnlineCosts:
    """A cost table, the day, and a shape for each size of batch in powers of two."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
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
        seconds = self._table.verify_seconds(rows, context, sequences) * np.exp(self._day + shape.at(rows))
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
        known = self._newest.correct(rows, surprise)
        self._day += _DAY_RATE * surprise * known / (known + _TRUSTED)

    def _note_error(self, error: float) -> None:
        self._observed += 1
        self._error += max(_ERROR_RATE, 1 / self._observed) * (error - self._error)


class _Shape:
    """The logarithm of what the table's predictions are multiplied by on an ordinary day, point by point."""

    def __init__(self, logs: FloatArray) -> None:
        self.logs = logs.copy()  # [points]
        self._num_seen = np.zeros_like(logs)  # rows that were run beside each point

    def at(self, rows: FloatArray) -> FloatArray:
        """# [n] -> [n]"""
        logs: FloatArray = np.interp(np.log2(np.maximum(rows, 1.0)), _POINTS, self.logs)
        return logs

    def correct(self, rows: int, surprise: float) -> float:
        """Move the prediction for so many rows: to what was seen when it is the first time, to the mean of what was
        seen after that. Points of which nothing is known follow. # -> how often such rows had been run"""
        near = np.maximum(0.0, 1.0 - _PER_OCTAVE * np.abs(_POINTS - math.log2(max(rows, 1))))
        weight = max(float(near @ near), 0.5)
        known = float(near @ self._num_seen) / weight
        rate = max(_SHAPE_RATE, 1.0 / (1.0 + known))
        self._num_seen += near
        self.logs += rate * surprise * np.where(self._num_seen >= 0.5, near / weight, 1.0)
        return known
