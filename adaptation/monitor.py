"""Is the drafter that serves getting worse? Alarms over windows of scores (emitted tokens per verify).

`PairedCusum` compares it with the anchor drafter on the same texts; `FallingWindows` is the paper's rule on what was
served; `Collapse` sees a drafter that earns nothing. `RollbackMonitor` gathers their windows, query by query.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt

from adaptation.config import Tuning
from adaptation.policy import State

AlarmReason = Literal["not_finite", "worse_than_anchor", "worse_than_before", "falling", "collapsed"]

_SLACK = 0.5  # fall per group that is forgiven, in standard errors (k)
_THRESHOLD = 7.0  # sum of falls that raises the alarm, in standard errors (h)
_COLLAPSE_MARGIN = 0.05  # a drafter that earns less than this per verify has collapsed
_FORGET = 0.9  # weight of the past in the spread of the pairs, per window
_GROUP = 4  # pairs
_LEAST_SPREAD = 0.01  # emitted per verify; a smaller spread is a replay of equal drafters, not knowledge


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why what serves is not trusted any more: `statistic` has exceeded `limit`, or a score was no number."""

    reason: AlarmReason
    statistic: float
    limit: float


class _Known(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Known = TypeVar("Known", bound=_Known)


class _Resumable(Generic[Known]):
    """An alarm, with what it knows as a record that can be stored."""

    def __init__(self, known: Known) -> None:
        self._now = known

    def reset(self) -> None:
        """Another drafter serves now."""
        self._now = type(self._now)()

    def state(self) -> State:
        return self._now.model_dump(mode="json")

    def restore(self, state: State) -> None:
        """Raises ValueError for a state that is not one, and then changes nothing."""
        self._now = type(self._now).model_validate(state)


class _CusumState(_Known):
    total: NonNegativeFloat = 0.0
    squares: NonNegativeFloat = 0.0
    freedom: NonNegativeFloat = 0.0


class PairedCusum(_Resumable[_CusumState]):
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
        super().__init__(_CusumState())

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


class _Window(_Known):
    mean: float
    squared_error: NonNegativeFloat  # of the mean


class _FallState(_Known):
    windows: tuple[_Window, ...] = ()


class FallingWindows(_Resumable[_FallState]):
    """Accepted length falling over three windows in a row (SpecBlock section 3.4), when the fall is significant.

    On pure noise every sixth triple of windows falls; `standard_errors` = 0 is that bare rule.
    """

    def __init__(self, *, standard_errors: float) -> None:
        self._standard_errors = standard_errors
        super().__init__(_FallState())

    def observe(self, scores: Sequence[float]) -> Alarm | None:
        """One window of what was served."""
        if len(scores) < 2 or not all(map(math.isfinite, scores)):
            return None
        window = _Window(mean=fmean(scores), squared_error=variance(scores) / len(scores))
        self._now = _FallState(windows=(*self._now.windows, window)[-3:])
        if len(self._now.windows) < 3:
            return None
        first, middle, last = self._now.windows
        if not first.mean > middle.mean > last.mean:
            return None
        error = math.sqrt(first.squared_error + last.squared_error)
        fall = (first.mean - last.mean) / max(error, _LEAST_SPREAD)
        return Alarm("falling", fall, self._standard_errors) if fall > self._standard_errors else None


class _CollapseState(_Known):
    emitted_tokens: NonNegativeInt = 0
    verifies: NonNegativeInt = 0
    collapsed: bool = False


class Collapse(_Resumable[_CollapseState]):
    """Tau near 1: drafting is pure cost. Judged whenever enough verifies have come together, and told once."""

    def __init__(self, *, least_verifies: int) -> None:
        self._least_verifies = least_verifies
        super().__init__(_CollapseState())

    @property
    def collapsed(self) -> bool:
        """What the last full window said; stays until a better one or a reset."""
        return self._now.collapsed

    def observe(self, emitted_tokens: int, verifies: int) -> Alarm | None:
        """Steps that verified at least one drafted node: the others emit one token whoever drafts."""
        emitted = self._now.emitted_tokens + emitted_tokens
        total = self._now.verifies + verifies
        if total < self._least_verifies:
            self._now = self._now.model_copy(update={"emitted_tokens": emitted, "verifies": total})
            return None
        loss, was_collapsed = 1.0 - emitted / total, self.collapsed
        self._now = _CollapseState(collapsed=loss > -_COLLAPSE_MARGIN)
        return Alarm("collapsed", loss, -_COLLAPSE_MARGIN) if self.collapsed and not was_collapsed else None


@dataclass(frozen=True, slots=True)
class TextScores:
    """Scores of one text."""

    serving: float
    anchor: float
    before: float | None  # of the weights that these have replaced; None: nobody compares any more


class RollbackMonitor:
    """Four alarms and the scores that do not fill a window yet.

    Beside the anchor, new weights are for a while compared with those they replaced: a drafter that has learnt a lot
    can lose all of it and still be no worse than the anchor.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._window = tuning.window_texts  # queries as served, or half as many replayed ones
        self._num_pairs = max(2, self._window // 2)
        self._cusum, self._cusum_before = (PairedCusum(least_pairs=self._num_pairs) for _ in range(2))
        self._falling = FallingWindows(standard_errors=tuning.fall_standard_errors)
        self._collapse = Collapse(least_verifies=tuning.collapse_verifies)
        self._alarms: dict[str, PairedCusum | FallingWindows | Collapse] = {
            "cusum": self._cusum,
            "cusum_before": self._cusum_before,
            "falling": self._falling,
            "collapse": self._collapse,
        }
        self._served: list[float] = []
        self._pairs: list[TextScores] = []
        self._probation = 0

    @property
    def collapsed(self) -> bool:
        """Whether drafting earns nothing now."""
        return self._collapse.collapsed

    @property
    def on_probation(self) -> bool:
        """Whether the weights are new."""
        return self._probation > 0

    def take_probation(self) -> bool:
        """Whether this text is to be scored even if it is no validation text, because the weights are new."""
        on_probation = self.on_probation
        self._probation -= on_probation
        return on_probation

    def observe_served(self, accepted: Sequence[int]) -> Alarm | None:
        """How far the serving drafter got in each verify of a query. # -> the first alarm, if any"""
        if not accepted:
            return None
        emitted = sum(accepted) + len(accepted)
        alarm = self._collapse.observe(emitted, len(accepted))
        if alarm is not None:
            return alarm
        self._served.append(emitted / len(accepted))
        if len(self._served) < self._window:
            return None
        window, self._served = self._served, []
        return self._falling.observe(window)

    def observe_scores(self, pair: TextScores) -> Alarm | None:
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

    def traffic_changed(self) -> None:
        """What was served before says nothing of what is served now; pairs are of the same texts and go on."""
        self._falling.reset()
        self._served = []

    def weights_changed(self) -> None:
        """Other weights serve now."""
        for alarm in self._alarms.values():
            alarm.reset()
        self._served, self._pairs = [], []
        self._probation = 2 * self._window

    def state(self) -> dict[str, State]:
        return {name: alarm.state() for name, alarm in self._alarms.items()}

    def restore(self, name: str, state: State) -> None:
        """Raises ValueError for a state that is not one."""
        if name not in self._alarms:
            raise ValueError("no such alarm")
        self._alarms[name].restore(state)
