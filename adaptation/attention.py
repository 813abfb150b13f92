"""Which queries are recorded at all: recording costs the engine 1 to 2 % of a step, learnt from or not.

While nothing promises a gain a small share of them is enough to notice that this has changed. What is accepted is
known of every query; it depends on the budget of trees too, which may draft nothing at all, so that a change of it says
no more than: look closely.
"""

from collections.abc import Sequence

from adaptation.change import TrafficChange

_IN_A_ROW = 8  # sequences; steps of recorded ones beside others cost as much as if all were
_ALERT_QUERIES = 32  # looked at closely once something has changed


class Attention:
    """`draws` belongs to the engine's thread, everything else to the one that learns."""

    def __init__(self, *, share: float, change: TrafficChange) -> None:
        """`share` of the queries that are recorded while nothing promises a gain; `change` of what is accepted"""
        self._round = round(_IN_A_ROW / share)
        self._change = change
        self._resting = False
        self._num_begun = 0
        self._alert = 0

    @property
    def resting(self) -> bool:
        return self._resting

    def draws(self) -> bool:
        """Whether the sequence that begins now is recorded."""
        self._num_begun += 1
        return not self._resting or self._num_begun % self._round < _IN_A_ROW

    def accepted(self, accepted: Sequence[int]) -> bool:
        """Hear of one finished query; whether these are not what they were. # by step"""
        self._alert = max(0, self._alert - 1)
        changed = self._change.hear(accepted)
        if changed:
            self._alert = _ALERT_QUERIES
        return changed

    def rest(self, allowed: bool) -> None:
        """Whether nothing promises a gain, as things stand."""
        self._resting = allowed and not self._alert

    def served_anew(self) -> None:
        """Other weights serve now."""
        self._change.served_anew()
