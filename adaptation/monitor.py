"""Alarms about the serving weights: paired comparisons of the serving drafter with the anchor, and with the weights it
replaced.

Both drafters of a pair are scored (tokens per verify) on the same text, which cancels the influence of the traffic. A
fall of the serving drafter's score alone (SpecBlock section 3.4) may as well come from other traffic.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from adaptation.config import Tuning
from adaptation.evaluator import TextScores
from adaptation.policy import State
from adaptation.records import AlarmReason
from adaptation.samples import ValidationText
from adaptation.timing import Pieces
from drafters.feedback import Query

_SLACK = 0.5  # fall per group that is not counted, in standard errors (k)
_THRESHOLD = 7.0  # cumulative fall above which an alarm is raised, in standard errors (h)
_FORGET = 0.9  # decay per window of earlier pairs in the estimated spread
_GROUP = 4  # pairs per step of the cumulative sum
_PROBATION = 4  # windows of pairs during which weights count as new
_LEAST_SPREAD = 0.01  # least standard deviation of a pair, in tokens per verify; equal drafters have a smaller one


@dataclass(frozen=True, slots=True)
class Alarm:
    """Alarm about the serving weights, with its reason: `statistic` exceeded `limit`, or a score was not finite."""

    reason: AlarmReason
    statistic: float
    limit: float


class _CusumState(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    total: NonNegativeFloat = 0.0
    squares: NonNegativeFloat = 0.0
    freedom: NonNegativeFloat = 0.0


class PairedCusum:
    """Cumulative sum of how far the serving drafter falls below the anchor on the same texts.

        S <- max(0, S - mean(d) / (sd(d) / sqrt(n)) - k),   d = serving - anchor;   alarm when S > h

    Each step of the sum adds a group of four pairs, in standard errors of the group's mean. With k = 0.5, equal
    drafters raise a false alarm once in some 2,600 groups at h = 6 (four times as often with single pairs), and once in
    some 7,000 at h = 7. At h = 7 a drafter that is worse by one standard deviation of a pair is detected within 20
    pairs.
    """

    def __init__(self, *, least_pairs: int, threshold: float = _THRESHOLD) -> None:
        assert least_pairs >= 2, "one pair has no spread"
        self._least_pairs = least_pairs
        self._threshold = threshold
        self._now = _CusumState()

    def observe(self, serving: Sequence[float], anchor: Sequence[float]) -> Alarm | None:
        """Add a window of scores of both drafters, one pair per text. Returns an alarm, or None; a window of fewer than
        `least_pairs` pairs is not added."""
        assert len(serving) == len(anchor), "scores do not come in pairs"
        if not all(map(math.isfinite, serving)):
            return Alarm("not_finite", self._now.total, self._threshold)
        differences = [ours - theirs for ours, theirs in zip(serving, anchor, strict=True)]
        if len(differences) < self._least_pairs or not all(map(math.isfinite, differences)):
            return None
        highest = self._add(differences)
        return Alarm("worse_than_anchor", highest, self._threshold) if highest > self._threshold else None

    def reset(self) -> None:
        """Reset the sum for other serving weights. The spread of the pairs is kept, since it depends on the traffic."""
        self._now = self._now.model_copy(update={"total": 0.0})

    def state(self) -> State:
        """Serializable state."""
        return self._now.model_dump(mode="json")

    def restore(self, state: State) -> None:
        """Load what `state` returned. Raises ValueError for anything else, and then changes nothing."""
        self._now = _CusumState.model_validate(state)

    def _add(self, differences: Sequence[float]) -> float:
        """Add a window of differences. Returns the highest value of the sum within the window."""
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
    """Queues texts to score, collects scores in windows, and runs two alarms on them: against the anchor and, for new
    weights, against the weights they replaced.

    The second is needed because a drafter that has learnt a lot can lose all of it and still be no worse than the
    anchor.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._num_pairs = tuning.alarm_texts
        self.alarms = {name: PairedCusum(least_pairs=self._num_pairs) for name in ("cusum", "cusum_before")}
        self._pairs: list[TextScores] = []
        self._probation = _PROBATION * self._num_pairs  # texts still to be scored with the replaced weights too
        self.unscored = deque[tuple[ValidationText, bool]](maxlen=tuning.unscored_texts)  # and whether held out
        self.scoring: Pieces[None] | None = None  # scores a text of the serving weights
        self.predicted_gain = 0.0  # sum over all publishes, in parts of the tokens per verify before each
        self._tokens = self._steps = 0  # of the queries that the serving weights served from beginning to end

    def served(self, query: Query) -> None:
        """Count a query that the serving weights served."""
        self._tokens += sum(query.accepted) + query.num_steps
        self._steps += query.num_steps

    @property
    def served_tau(self) -> float | None:
        """Tokens per verify of the serving weights, as served. Returns None before their first query."""
        return self._tokens / self._steps if self._steps else None

    @property
    def on_probation(self) -> bool:
        """Whether the serving weights are new, so that they are also compared with the weights they replaced."""
        return self._probation > 0

    def take_probation(self) -> bool:
        """Count down the probation of new weights by one text. Returns whether to score this text even if it is not
        held for validation."""
        on_probation = self.on_probation
        self._probation -= on_probation
        return on_probation

    def forget(self, scope: str | None) -> None:
        """Drop the queued texts of a scope, or all if it is None."""
        kept = (each for each in self.unscored if scope not in (None, each[0].scope))
        self.unscored = deque(kept, self.unscored.maxlen)

    def observe(self, pair: TextScores) -> Alarm | None:
        """Add the scores of one text. Returns an alarm, or None."""
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
        """Restart both alarms and the probation for other serving weights."""
        for alarm in self.alarms.values():
            alarm.reset()
        self.unscored.clear()
        self._pairs, self._tokens, self._steps = [], 0, 0
        self._probation = _PROBATION * self._num_pairs
