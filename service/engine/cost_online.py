"""Measured cost corrected while serving: how much slower or faster the machine is now than the table says, by rows.

A start-up table is right about shapes and wrong about the day: clocks change, neighbours come and go. Factors are kept
at every half power of two of rows and interpolated, so that the corrected curve has no jumps that a budget could fall
for. Each is corrected by what was run beside it, by as many sequences: were an error of trees of eight sequences, 16
rows, taken for one of 8 rows or of 16 sequences, a plain step would seem to take longer than it does, and drafting to
gain.
"""

import math

import numpy as np

from service.engine.cost import CostTable, FloatArray

_PER_OCTAVE = 2
_POINTS = np.arange(11.0 * _PER_OCTAVE + 1) / _PER_OCTAVE  # factors at 1, 1.4, 2, 2.8, 4, ... 2048 rows
_RATE = 0.2  # of an error, to the factors between which the rows lie, once several errors are known
_DRIFT = 0.01  # to those that are known by rows of their own
_ERROR_RATE = 0.05
_LARGEST_SURPRISE = 0.5  # natural logarithm: once a factor is known, one hiccup does not move it by more than a tenth


class OnlineCosts:
    """A cost table times factors that follow measured / predicted, for each size of batch in powers of two."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._by_size: dict[int, _Factors] = {}
        self._newest = _Factors(np.zeros_like(_POINTS))
        self._error = 0.0
        self._observed = 0

    @property
    def error(self) -> float:
        """Running mean of |predicted / measured - 1|."""
        return self._error

    def verify_seconds(self, rows: FloatArray, context: float, sequences: int) -> FloatArray:
        """Corrected seconds of forwards of so many rows, which must rise. # [n] -> [n]"""
        factors = self._by_size.get(sequences.bit_length(), self._newest)
        seconds = self._table.verify_seconds(rows, context, sequences) * factors.at(rows)
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
        """A size of batch begins with what the last one knew of the day."""
        size = sequences.bit_length()
        for other, factors in self._by_size.items():
            if other != size:
                factors.drift(surprise)
        self._newest = self._by_size.setdefault(size, _Factors(self._newest.logs))
        self._newest.correct(rows, surprise)

    def _note_error(self, error: float) -> None:
        self._observed += 1
        self._error += max(_ERROR_RATE, 1 / self._observed) * (error - self._error)


class _Factors:
    """What the table's predictions are multiplied by, point by point."""

    def __init__(self, logs: FloatArray) -> None:
        self.logs = logs.copy()  # [points]
        self._num_seen = np.zeros_like(logs)  # rows that were run beside each point

    def at(self, rows: FloatArray) -> FloatArray:
        """# [n] -> [n]"""
        factors: FloatArray = np.exp(np.interp(np.log2(np.maximum(rows, 1.0)), _POINTS, self.logs))
        return factors

    def drift(self, surprise: float) -> None:
        """Follow the day a little, by what was seen elsewhere."""
        self.logs += _DRIFT * surprise

    def correct(self, rows: int, surprise: float) -> None:
        """Move the prediction for so many rows: to what was seen when it is the first time, by `_RATE` of the error
        in the end. Points of which nothing is known follow whatever is run."""
        near = np.maximum(0.0, 1.0 - _PER_OCTAVE * np.abs(_POINTS - math.log2(max(rows, 1))))
        self._num_seen += near
        rate = max(_RATE, 1.0 / max(1.0, float(near @ self._num_seen)))
        own = near / max(float(near @ near), 0.5)
        everywhere = np.where(self._num_seen >= 0.5, _DRIFT, rate)
        self.logs += surprise * np.maximum(rate * own, everywhere)
