"""Predicts the seconds of verifying and drafting, from tables measured at start-up and kept on disk, corrected while
serving.

The tables are numpy arrays on the host, where a prediction takes microseconds; on a device it would take a dozen kernel
launches.
"""

import hashlib
import json
import logging
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from drafters.decision import bucket_of
from drafters.files import replace_file

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float64]
CostKey = Mapping[str, str | int]
"""Cache key of measured seconds: the model, machine and settings that they depend on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTable:
    """Measured seconds of one forward on a grid. Between grid points seconds are interpolated, beyond the last point
    they are extended linearly."""

    sequences: FloatArray  # [sequence points], rising
    contexts: FloatArray  # [context points], rising
    rows: FloatArray  # [row points], rising
    seconds: FloatArray  # [sequence points, context points, row points]

    def verify_seconds(self, rows: FloatArray, context: float, sequences: int = 1) -> FloatArray:
        """Predict the seconds of forwards by their number of rows; `context`: mean tokens per sequence. # [n] -> [n]"""
        return along(self.rows, self.curve(context, sequences), rows)

    def curve(self, context: float, sequences: int) -> FloatArray:
        """Interpolate the seconds at the row points for this context length and batch. # -> [row points]"""
        # Made monotonic, because a curve extended beyond the last point could fall, even below zero.
        by_context = _by_context(self, sequences)
        raised: FloatArray = np.maximum.accumulate(_shares(self.contexts, context) @ by_context)
        return raised


@lru_cache(maxsize=16)
def _by_context(table: CostTable, sequences: int) -> FloatArray:
    """Interpolate the seconds for this batch, which rise with the context. # -> [context points, row points]"""
    shares = _shares(table.sequences, sequences)
    by_context: FloatArray = np.maximum.accumulate(np.tensordot(shares, table.seconds, 1))
    return by_context


def rising(seconds: FloatArray, axis: int = 0) -> FloatArray:
    """Lower each value to the minimum of the later ones: noise only adds time, so fewer rows cannot take longer than
    more rows did."""
    backwards = (*(slice(None),) * axis, slice(None, None, -1))
    made: FloatArray = np.minimum.accumulate(seconds[backwards], axis=axis)[backwards]
    return made


def along(points: FloatArray, curve: FloatArray, values: FloatArray) -> FloatArray:
    """Interpolate the curve at rising values, and extend it linearly beyond the last point.
    # points, curve [points]; values [n] -> [n]"""
    inside: FloatArray = np.interp(values, points, curve)
    if points.shape[0] == 1 or values[-1] <= points[-1]:
        return inside
    slope = float((curve[-1] - curve[-2]) / (points[-1] - points[-2]))
    beyond: FloatArray = np.maximum(0.0, values - points[-1])
    return inside + slope * beyond


def _shares(points: FloatArray, value: float) -> FloatArray:
    """Shares of the values at the points in the one at `value`: interpolated between two, extended beyond the last.
    # -> [points]"""
    if len(points) == 1:
        return np.ones(1)
    shares = np.zeros_like(points)
    above = min(max(bisect_left(points, value), 1), len(points) - 1)
    share = max(0.0, float((value - points[above - 1]) / (points[above] - points[above - 1])))
    shares[above - 1 : above + 1] = 1.0 - share, share
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """Measured seconds of drafting one tree for each sequence of a batch, by batch size."""

    batches: FloatArray  # [batch points], rising
    seconds: FloatArray  # [batch points]

    def draft_seconds(self, batch: int) -> float:
        """Interpolate the seconds for a batch of this size."""
        return float(np.interp(batch, self.batches, self.seconds))


FREE = DraftCosts(batches=np.ones(1), seconds=np.zeros(1))
"""Draft costs of a drafter that was not measured."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs measured at start-up."""

    verify: CostTable
    drafts: DraftCosts
    gains_file: Path | None = None  # file that keeps the learnt gains of drafting for the next start of the server

    @property
    def draft_share(self) -> float:
        """Seconds of drafting in plain steps, for one sequence with a short text."""
        plain = self.verify.verify_seconds(np.ones(1), float(self.verify.contexts[0]))
        return self.drafts.draft_seconds(1) / float(plain[0])  # planned transfer: numpy

    @property
    def least_that_pays(self) -> float:
        """Lower bound of the survival at which a node can pay. Without nodes a step of B sequences emits B tokens in
        T_draft(B) + T(B) seconds, and the best number of nodes emits no fewer a second, so a node must be accepted with
        a probability of at least B / (T_draft(B) + T(B)) times the seconds of its row. These are the mean of some
        rows' (at least `_MEASURABLE`), so that noise of the measurement makes none of them free, and half as long as
        measured, because prices are corrected while serving."""
        table, found = self.verify, list[float]()
        for batch, context in product(table.sequences, table.contexts):
            rows = table.rows[table.rows >= batch + _MEASURABLE]
            first, *seconds = table.verify_seconds(np.array([batch, *rows]), context, int(batch))
            rate = batch / (self.drafts.draft_seconds(int(batch)) + first)
            found += ((np.array(seconds) - first) / (rows - batch) * rate / 2).tolist()  # planned transfer: numpy
        return min(found, default=0.0)

    @staticmethod
    def read(folder: Path, key: CostKey) -> "Costs | None":
        """Load the costs saved for this key. Returns None if there is no file, and None with a warning if the file is
        damaged or has another key."""
        file = cost_file(folder, key)
        try:
            content = json.loads(file.read_text())
            if content["key"] != key:
                raise ValueError("the file has another key")
            verify = CostTable(**_axes(content["verify"], "sequences", "contexts", "rows"))
            return Costs(verify, DraftCosts(**_axes(content["drafts"], "batches")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("cannot read the measured costs in %s (%s); measuring again", file, error)
            return None

    def write(self, folder: Path, key: CostKey) -> None:
        """Save the costs. If the folder cannot be written, a warning is logged and the next start measures again."""
        lists = {"verify": _as_lists(self.verify), "drafts": _as_lists(self.drafts)}
        write_whole(cost_file(folder, key), {"key": key, **lists})


_MEASURABLE = 4  # rows whose seconds stand out from the noise of a measurement
_PER_OCTAVE = 2
_POINTS = np.arange(11.0 * _PER_OCTAVE + 1) / _PER_OCTAVE  # log2 of 1, 1.4, 2, 2.8, 4, ... 2048 rows
_DEVIATION = 0.2  # prior standard deviation of a correction, as a natural logarithm
_OCTAVES = 2.0  # distance in log2 of rows at which the correlation of two corrections is 1/e
_NOISE = 0.5  # standard deviation of the logarithm of one forward's seconds, including drift of the machine
_FORGETTING = 0.01  # share of the learnt certainty that is lost per forward
_PRIOR = _DEVIATION**2 * np.exp(-np.abs(_POINTS[:, None] - _POINTS) / _OCTAVES)
_DRIFT_RATE = 0.1  # share of an error that is attributed to the drift if the curve is certain
_MOST_SURPRISE = 0.5  # cap on the error of one forward, as a natural logarithm, so that a hiccup hardly counts


class OnlineCosts:
    """A cost table corrected while serving, by rows and by batch size (`bucket_of`):

        seconds = (1 - head) * S(rows) + head * S(scored rows)
        log S(rows) = log table(rows, context, sequences) + drift + curve[sequences](rows)

    The table is of rows that all have scores, which those of prompts have not: `head` is the share of the weights that
    give scores. The drift of the machine is common to all batches and adapts quickly; each curve adapts slowly, to
    forwards of its own batch size only (docs/decisions/0184).
    """

    def __init__(self, table: CostTable, head_share: float = 0.0) -> None:
        self._head_share = head_share
        self._curve = lru_cache(maxsize=2)(table.curve)  # one step uses the same curve several times
        self._points = table.rows
        self._weights = lru_cache(maxsize=256)(self._weights_of)
        self._drift = 0.0
        self._corrections: dict[int, _CurveCorrection] = {}  # corrections by bit length of the batch size
        self._newest = _CurveCorrection(np.zeros_like(_POINTS))  # the correction that was updated last
        self._known: dict[tuple[int, float, int, int], float] = {}  # cache of predictions, cleared by `learn`

    def verify_seconds(self, rows: Sequence[float], context: float, sequences: int, unscored: int = 0) -> FloatArray:
        """Predict the corrected seconds of forwards, in which `unscored` of the rows give no scores.
        # rows [n], rising, at least 1 -> [n]"""
        seconds = self._scored_seconds(rows, context, sequences)
        if unscored and self._head_share:
            scored = self._scored_seconds(tuple(max(1, count - unscored) for count in rows), context, sequences)
            seconds += self._head_share * (scored - seconds)
        return seconds

    def _scored_seconds(self, rows: Sequence[float], context: float, sequences: int) -> FloatArray:
        on_table, on_correction = self._weights(rows)
        logs = on_correction @ self._correction(sequences).logs
        logs += self._drift
        seconds: FloatArray = np.exp(logs, out=logs)
        seconds *= on_table @ self._curve(context, sequences)
        # Fewer rows cannot take longer than more rows, so corrections of large forwards also lower smaller ones.
        return rising(seconds).copy()  # with strides that torch takes

    def _weights_of(self, rows: Sequence[float]) -> tuple[FloatArray, FloatArray]:
        """Weights by which the values at the table's points, and at those of a correction, are interpolated at these
        numbers of rows; a correction is constant beyond its last point. # -> [n, points] each"""
        values = np.array(rows, dtype=np.float64)
        logs = np.minimum(np.log2(values), _POINTS[-1])
        on_table = [along(self._points, unit, values) for unit in np.eye(self._points.size)]
        return np.stack(on_table, 1), np.stack([along(_POINTS, unit, logs) for unit in np.eye(_POINTS.size)], 1)

    def forward_seconds(self, rows: int, context: float, sequences: int, unscored: int = 0) -> float:
        """Predict the corrected seconds of one forward."""
        key = rows, context, sequences, unscored
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = float(self.verify_seconds((rows,), context, sequences, unscored)[0])
        return found

    def learn(self, rows: int, context: float, sequences: int, seconds: float, unscored: int = 0) -> float:
        """Update the corrections by a forward's measured seconds. Returns the seconds predicted before the update."""
        predicted = self.forward_seconds(rows, context, sequences, unscored)
        self._known.clear()
        if seconds <= 0.0 or predicted <= 0.0:
            return predicted
        surprise = min(max(math.log(seconds / predicted), -_MOST_SURPRISE), _MOST_SURPRISE)
        # The first forward of a batch-size bucket starts from the correction that was updated last.
        self._newest = self._corrections.setdefault(bucket_of(sequences), self._correction(sequences))
        self._drift += _DRIFT_RATE * surprise * self._newest.correct(rows, surprise)
        return predicted

    def _correction(self, sequences: int) -> "_CurveCorrection":
        return self._corrections.get(bucket_of(sequences)) or _CurveCorrection(self._newest.logs)


class _CurveCorrection:
    """Correction of the table's predictions, as the logarithm of a factor: a Gaussian process over the logarithm of
    rows (Rasmussen, Williams, "Gaussian processes for machine learning", 2006, section 2.2).

    Legend: points = numbers of rows at which the logarithm is kept; it is interpolated between them.
    """

    def __init__(self, logs: FloatArray) -> None:
        self.logs = logs.copy()  # [points], posterior mean
        self._learnt = np.zeros_like(_PRIOR)  # [points, points], reduction of the prior covariance by observations

    def correct(self, rows: int, surprise: float) -> float:
        """Update the curve by an error `surprise` of a prediction's logarithm. Returns the certainty of the curve at
        `rows` before the update, from 0 (prior) to 1."""
        near = _near(rows)
        shared = near.prior - near.shares @ self._learnt
        variance = float(near.shares @ shared)
        gain = shared * (1.0 / (variance + _NOISE**2))
        self._learnt += np.multiply.outer(gain, shared)
        self._learnt *= 1.0 - _FORGETTING
        gain *= surprise
        self.logs += gain
        return 1.0 - variance / near.variance


class _Near(NamedTuple):
    """Position of a number of rows between two points, with its prior covariance."""

    shares: FloatArray  # [points] see `_shares`
    prior: FloatArray  # [points] prior covariance with this number of rows
    variance: float  # prior variance at this number of rows


@lru_cache(maxsize=4096)
def _near(rows: int) -> _Near:
    place = min(math.log2(max(rows, 1)), float(_POINTS[-1]))  # more rows count as the last point
    shares = _shares(_POINTS, place)
    prior = _PRIOR @ shares
    return _Near(shares, prior, float(shares @ prior))


_DRAFT_RATE = 0.1  # rate of the moving averages
_MOST_TIMES = 4.0  # cap on drafting seconds as a multiple of the expected ones, so that a hiccup hardly counts


class OnlineDraftCosts:
    """Moving averages of drafting seconds by batch size (`bucket_of`), starting from the seconds measured at
    start-up."""

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        self._seconds: dict[int, float] = {}

    def draft_seconds(self, batch: int) -> float:
        """Expected drafting seconds for a batch of this size."""
        known = self._seconds.get(bucket_of(batch))
        return self._costs.draft_seconds(batch) if known is None else known

    def learn(self, batch: int, seconds: float) -> float:
        """Update the average by the drafting seconds of a step. Returns these seconds, capped at a multiple of the
        expected ones."""
        expected = self.draft_seconds(batch)
        likely = min(seconds, _MOST_TIMES * expected) if expected > 0 else seconds
        self._seconds[bucket_of(batch)] = expected + _DRAFT_RATE * (likely - expected) if expected > 0 else likely
        return likely


def cost_file(folder: Path, key: CostKey, what: str = "costs") -> Path:
    """Path of the file that keeps the costs of this key; `what` is the prefix of its name, and selects other files of
    the same key."""
    text = json.dumps(key, sort_keys=True)
    return folder / f"{what}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _as_lists(table: CostTable | DraftCosts) -> dict[str, list[Any]]:
    return {axis: values.tolist() for axis, values in asdict(table).items()}  # planned transfer: numpy, on the host


def write_whole(file: Path, content: object) -> None:
    """Write `content` as JSON, atomically; a failure is logged as a warning and not raised."""
    try:
        replace_file(file, json.dumps(content).encode(), shared=True)
    except OSError as error:
        logger.warning("cannot save measurements in %s (%s); the next start measures again", file, error)


def _axes(content: dict[str, Any], *names: str) -> dict[str, FloatArray]:
    """Read a table's axes and seconds as arrays. Raises ValueError, KeyError or TypeError if they are invalid."""
    table = {name: np.asarray(content[name], dtype=np.float64) for name in (*names, "seconds")}
    if table["seconds"].shape != tuple(table[name].size for name in names):
        raise ValueError(f"the shape {table['seconds'].shape} of a table does not match its axes")
    if not all(values.size and np.isfinite(values).all() for values in table.values()):
        raise ValueError("a table is empty or has values that are infinite or NaN")
    return table
