"""Is what was learnt worse than what it came from? Two alarms over scores (emitted tokens per verify) of the same
texts: against the drafter as deployed, and for a while against the weights that were replaced.

Of pairs nothing remains but the drafters, whatever the traffic does; a fall of what is served (SpecBlock section 3.4)
is as often other traffic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from adaptation.config import Tuning
from adaptation.policy import State

AlarmReason = Literal["not_finite", "worse_than_anchor", "worse_than_before"]

_SLACK = 0.5  # fall per group that is forgiven, in standard errors (k)
_THRESHOLD = 7.0  # sum of falls that raises the alarm, in standard errors (h)
_FORGET = 0.9  # weight of the past in the spread of the pairs, per window
_GROUP = 4  # pairs
_PROBATION = 4  # windows of pairs during which weights count as new
_LEAST_SPREAD = 0.01  # emitted per verify; a smaller spread is a replay of equal drafters, not knowledge


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why what serves is not trusted any more: `statistic` has exceeded `limit`, or a score was no number."""

    reason: AlarmReason
    statistic: float
    limit: float


class _CusumState(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    total: NonNegativeFloat = 0.0
    squares: NonNegativeFloat = 0.0
    freedom: NonNegativeFloat = 0.0


class PairedCusum:
    """Cumulative sum of how far the serving drafter falls behind the anchor on the same sequences.

        S <- max(0, S - mean(d) / (sd(d) / sqrt(n)) - k),   d = serving - anchor;   alarm when S > h

    One step per group of four pairs, in standard errors of its mean. With k = 0.5 equal drafters raise a false alarm
    once in some 2,600 groups at h = 6 (single pairs: four times as often) and once in some 7,000 at h = 7, where a
    drafter that is behind by one standard deviation of a pair is caught within 20 pairs.
    """

    def __init__(self, *, least_pairs: int, threshold: float = _THRESHOLD) -> None:
        assert least_pairs >= 2, "one pair has no spread"
        self._least_pairs = least_pairs
        self._threshold = threshold
        self._now = _CusumState()

    def observe(self, serving: Sequence[float], anchor: Sequence[float]) -> Alarm | None:
        """One window: scores of both drafters, sequence by sequence."""
        assert len(serving) == len(anchor), "scores do not come in pairs"
        if not all(map(math.isfinite, serving)):
            return Alarm("not_finite", self._now.total, self._threshold)
        differences = [ours - theirs for ours, theirs in zip(serving, anchor, strict=True)]
        if len(differences) < self._least_pairs or not all(map(math.isfinite, differences)):
            return None
        highest = self._add(differences)
        return Alarm("worse_than_anchor", highest, self._threshold) if highest > self._threshold else None

    def reset(self) -> None:
        """Another drafter serves now. How far pairs spread is a matter of the traffic and stays known."""
        self._now = self._now.model_copy(update={"total": 0.0})

    def state(self) -> State:
        return self._now.model_dump(mode="json")

    def restore(self, state: State) -> None:
        """Raises ValueError for a state that is not one, and then changes nothing."""
        self._now = _CusumState.model_validate(state)

    def _add(self, differences: Sequence[float]) -> float:
        """The highest the sum came to in this window."""
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


@dataclass(frozen=True, slots=True)
class TextScores:
    """Scores of one text."""

    serving: float
    anchor: float
    before: float | None  # of the weights that these have replaced; None: nobody compares any more


class RollbackMonitor:
    """Both alarms, and the scores that do not fill a window yet.

    Beside the anchor, new weights are for a while compared with those they replaced: a drafter that has learnt a lot
    can lose all of it and still be no worse than the anchor.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._num_pairs = tuning.alarm_texts
        self._cusum, self._cusum_before = (PairedCusum(least_pairs=self._num_pairs) for _ in range(2))
        self._alarms = {"cusum": self._cusum, "cusum_before": self._cusum_before}
        self._pairs: list[TextScores] = []
        self._probation = 0

    @property
    def on_probation(self) -> bool:
        """Whether the weights are new."""
        return self._probation > 0

    def take_probation(self) -> bool:
        """Whether this text is to be scored even if it is no validation text, because the weights are new."""
        on_probation = self.on_probation
        self._probation -= on_probation
        return on_probation

    def observe(self, pair: TextScores) -> Alarm | None:
        """How several drafters did on the same text. # -> an alarm, if any"""
        self._pairs.append(pair)
        if len(self._pairs) < self._num_pairs:
            return None
        window, self._pairs = self._pairs, []
        serving = [one.serving for one in window]
        alarm = self._cusum.observe(serving, [one.anchor for one in window])
        return alarm or self._compare_with_before(window)

    def _compare_with_before(self, window: Sequence[TextScores]) -> Alarm | None:
        known = [(one.serving, one.before) for one in window if one.before is not None]
        alarm = self._cusum_before.observe([ours for ours, _ in known], [theirs for _, theirs in known])
        return None if alarm is None else replace(alarm, reason="worse_than_before")

    def weights_changed(self) -> None:
        """Other weights serve now."""
        for alarm in self._alarms.values():
            alarm.reset()
        self._pairs = []
        self._probation = _PROBATION * self._num_pairs

    def state(self) -> dict[str, State]:
        return {name: alarm.state() for name, alarm in self._alarms.items()}

    def restore(self, name: str, state: State) -> None:
        """Raises ValueError for a state that is not one."""
        if name not in self._alarms:
            raise ValueError("no such alarm")
        self._alarms[name].restore(state)
