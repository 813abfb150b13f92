"""Alarms over what serves: paired comparisons of the serving drafter with the anchor, and with the weights it replaced.

Both drafters of a pair are scored (tokens per verify) on the same text, so that the traffic cancels. A fall of the
served score alone (SpecBlock section 3.4) is as often other traffic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from adaptation.config import Tuning
from adaptation.evaluator import TextScores
from adaptation.policy import State
from adaptation.records import AlarmReason

_SLACK = 0.5  # forgiven fall per group, in standard errors (k)
_THRESHOLD = 7.0  # sum of falls that raises the alarm, in standard errors (h)
_FORGET = 0.9  # weight of the past in the spread of the pairs, per window
_GROUP = 4  # pairs per step of the sum
_PROBATION = 4  # windows of pairs during which weights count as new
_LEAST_SPREAD = 0.01  # tokens per verify; a smaller spread comes from replays of equal drafters


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why the serving weights are not trusted any more: `statistic` exceeded `limit`, or a score was not finite."""

    reason: AlarmReason
    statistic: float
    limit: float


class _CusumState(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    total: NonNegativeFloat = 0.0
    squares: NonNegativeFloat = 0.0
    freedom: NonNegativeFloat = 0.0


class PairedCusum:
    """Cumulative sum of how far the serving drafter falls below the anchor on the same sequences.

        S <- max(0, S - mean(d) / (sd(d) / sqrt(n)) - k),   d = serving - anchor;   alarm when S > h

    One step per group of four pairs, in standard errors of its mean. With k = 0.5 equal drafters raise a false alarm
    once in some 2,600 groups at h = 6 (single pairs: four times as often) and once in some 7,000 at h = 7, where a
    drafter that is worse by one standard deviation of a pair is caught within 20 pairs.
    """

    def __init__(self, *, least_pairs: int, threshold: float = _THRESHOLD) -> None:
        assert least_pairs >= 2, "one pair has no spread"
        self._least_pairs = least_pairs
        self._threshold = threshold
        self._now = _CusumState()

    def observe(self, serving: Sequence[float], anchor: Sequence[float]) -> Alarm | None:
        """Add one window: scores of both drafters, text by text. # -> an alarm, if any"""
        assert len(serving) == len(anchor), "scores do not come in pairs"
        if not all(map(math.isfinite, serving)):
            return Alarm("not_finite", self._now.total, self._threshold)
        differences = [ours - theirs for ours, theirs in zip(serving, anchor, strict=True)]
        if len(differences) < self._least_pairs or not all(map(math.isfinite, differences)):
            return None
        highest = self._add(differences)
        return Alarm("worse_than_anchor", highest, self._threshold) if highest > self._threshold else None

    def reset(self) -> None:
        """Reset the sum because another drafter serves; keep the spread of pairs, which depends on the traffic."""
        self._now = self._now.model_copy(update={"total": 0.0})

    def state(self) -> State:
        """Serializable state."""
        return self._now.model_dump(mode="json")

    def restore(self, state: State) -> None:
        """Load what `state` returned. Raises ValueError for anything else, and then changes nothing."""
        self._now = _CusumState.model_validate(state)

    def _add(self, differences: Sequence[float]) -> float:
        """Add a window of differences. # -> the highest value of the sum within it"""
        freedom = _FORGET * self._now.freedom + len(differences) - 1
        squares = _FORGET * self._now.squares + variance(differences) * (len(differences) - 1)
        spread = max(math.sqrt(squares / freedom), _LEAST_SPREAD)
        total = highest = self._now.total
        for start in range(0, len(differences), _GROUP):
            group = differences[start : start + _GROUP]
            fall = -fmean(group) / (spread / math.sqrt(len(group)))
            total = max(0.0, total + fall - _SLACK)
            highest = max(highest, total)
        self._now = _CusumState(total=total, squares=squares, freedom=freedom)
        return highest


class RollbackMonitor:
    """Runs both alarms on windows of scores.

    Besides the anchor, new weights are for a while compared with those they replaced: a drafter that has learnt a lot
    can lose all of it and still be no worse than the anchor.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._num_pairs = tuning.alarm_texts
        self.alarms = {name: PairedCusum(least_pairs=self._num_pairs) for name in ("cusum", "cusum_before")}
        self._pairs: list[TextScores] = []
        self._probation = _PROBATION * self._num_pairs  # texts that are still scored with the replaced weights

    @property
    def on_probation(self) -> bool:
        """Whether the serving weights are new."""
        return self._probation > 0

    def take_probation(self) -> bool:
        """Count down the probation of new weights. # -> whether to score this text even if it is not for validation"""
        on_probation = self.on_probation
        self._probation -= on_probation
        return on_probation

    def observe(self, pair: TextScores) -> Alarm | None:
        """Add the scores of one text. # -> an alarm, if any"""
        self._pairs.append(pair)
        if len(self._pairs) < self._num_pairs:
            return None
        window, self._pairs = self._pairs, []
        alarm = self.alarms["cusum"].observe([one.serving for one in window], [one.anchor for one in window])
        return alarm or self._compare_with_before(window)

    def _compare_with_before(self, window: Sequence[TextScores]) -> Alarm | None:
        known = [(one.serving, one.before) for one in window if one.before is not None]
        alarm = self.alarms["cusum_before"].observe([ours for ours, _ in known], [theirs for _, theirs in known])
        return None if alarm is None else replace(alarm, reason="worse_than_before")

    def weights_changed(self) -> None:
        """Restart alarms and probation because other weights serve."""
        for alarm in self.alarms.values():
            alarm.reset()
        self._pairs = []
        self._probation = _PROBATION * self._num_pairs
