"""The alarms over the drafter that serves, fed query by query: gathers the windows they judge.

Knows neither what a score is made of nor what follows from an alarm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from adaptation.alarm import AlarmReason, Collapse, FallingWindows, PairedCusum, Verdict
from adaptation.policy import State


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why what serves is not trusted any more."""

    reason: AlarmReason | Literal["worse_than_before"]
    statistic: float
    limit: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Scores of one text."""

    serving: float
    anchor: float
    before: float | None  # of the weights that these have replaced; None: nobody compares any more


class Watch:
    """Four alarms and the scores that do not fill a window yet.

    Beside the anchor, new weights are for a while compared with those they replaced: a drafter that has learnt a lot
    can lose all of it and still be no worse than the anchor.
    """

    def __init__(
        self,
        cusum: PairedCusum,
        cusum_before: PairedCusum,
        falling: FallingWindows,
        collapse: Collapse,
        *,
        window: int,
        pairs: int,
    ) -> None:
        """`window` sequences as served, `pairs` replayed ones, are judged together."""
        self._cusum = cusum
        self._cusum_before = cusum_before
        self._falling = falling
        self._collapse = collapse
        self._window = window
        self._num_pairs = pairs
        self._served: list[float] = []
        self._pairs: list[Pair] = []
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
        """Whether this text is to be scored even if it was not held back, because the weights are new."""
        on_probation = self.on_probation
        self._probation -= on_probation
        return on_probation

    def served(self, accepted: Sequence[int]) -> Alarm | None:
        """Hear how far the serving drafter got in each verify of a query. # -> the first alarm, if any"""
        if not accepted:
            return None
        emitted = sum(accepted) + len(accepted)
        verdict = self._collapse.observe(emitted, len(accepted))
        if verdict.fired:
            return _alarm(verdict)
        self._served.append(emitted / len(accepted))
        if len(self._served) < self._window:
            return None
        window, self._served = self._served, []
        return _alarm(self._falling.observe(window))

    def replayed(self, pair: Pair) -> Alarm | None:
        """Hear how several drafters did on the same text. # -> an alarm, if any"""
        self._pairs.append(pair)
        if len(self._pairs) < self._num_pairs:
            return None
        window, self._pairs = self._pairs, []
        serving = [one.serving for one in window]
        alarm = _alarm(self._cusum.observe(serving, [one.anchor for one in window]))
        return alarm or self._compare_with_before(window)

    def _compare_with_before(self, window: Sequence[Pair]) -> Alarm | None:
        known = [(one.serving, one.before) for one in window if one.before is not None]
        verdict = self._cusum_before.observe([ours for ours, _ in known], [theirs for _, theirs in known])
        return Alarm("worse_than_before", verdict.statistic, verdict.limit) if verdict.fired else None

    def traffic_changed(self) -> None:
        """What was served before says nothing of what is served now; pairs are of the same texts and go on."""
        self._falling.reset()
        self._served = []

    def served_anew(self) -> None:
        """Other weights serve now."""
        for alarm in (self._cusum, self._cusum_before, self._falling, self._collapse):
            alarm.reset()
        self._served, self._pairs = [], []
        self._probation = 2 * self._window

    def state(self) -> dict[str, State]:
        return {
            "cusum": self._cusum.state(),
            "cusum_before": self._cusum_before.state(),
            "falling": self._falling.state(),
            "collapse": self._collapse.state(),
        }

    def restore(self, name: str, state: State) -> None:
        """Raises ValueError for a state that is not one."""
        match name:
            case "cusum":
                self._cusum.restore(state)
            case "cusum_before":
                self._cusum_before.restore(state)
            case "falling":
                self._falling.restore(state)
            case "collapse":
                self._collapse.restore(state)
            case _:
                raise ValueError("no such alarm")


def _alarm(verdict: Verdict) -> Alarm | None:
    return Alarm(verdict.reason, verdict.statistic, verdict.limit) if verdict.fired else None
