"""Measured cost corrected while serving: how much slower or faster the machine is now than the table says, by rows.

A start-up table is right about shapes and wrong about the day: clocks change, neighbours come and go. Factors are kept
at powers of two of rows and interpolated, so that the corrected curve has no jumps that a budget could fall for.
"""

import math

import numpy as np

from service.engine.cost import CostTable, FloatArray

_POINTS = np.arange(12.0)  # factors at 1, 2, 4, ... 2048 rows
_GLOBAL_RATE = 0.05  # of an error, to all factors
_LOCAL_RATE = 0.15  # to those beside the rows that were run
_OCTAVES = 0.6  # how far that reaches
_ERROR_RATE = 0.05
_LARGEST_SURPRISE = 0.5  # natural logarithm: one hiccup must not move a factor by more than a tenth


class OnlineCosts:
    """A cost table times factors that follow measured / predicted."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._log_factors = np.zeros_like(_POINTS)
        self._error = 0.0
        self._observed = 0

    @property
    def error(self) -> float:
        """Running mean of |predicted / measured - 1|."""
        return self._error

    def verify_seconds(self, rows: FloatArray, context: float, sequences: int) -> FloatArray:
        """Corrected seconds of forwards of so many rows, which must rise. # [n] -> [n]"""
        factors = np.interp(np.log2(np.maximum(rows, 1.0)), _POINTS, self._log_factors)
        seconds = self._table.verify_seconds(rows, context, sequences) * np.exp(factors)
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
        distance = (_POINTS - math.log2(max(rows, 1))) / _OCTAVES
        self._log_factors += surprise * (_GLOBAL_RATE + _LOCAL_RATE * np.exp(-0.5 * distance**2))
        return predicted

    def _note_error(self, error: float) -> None:
        self._observed += 1
        self._error += max(_ERROR_RATE, 1 / self._observed) * (error - self._error)
