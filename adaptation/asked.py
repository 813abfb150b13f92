"""Has the traffic changed, by how well the drafter as deployed would do on its texts, whether anybody drafts or not?

Where drafting does not pay hardly anything else is known of a text. Those that judge are replayed anyway, the others as
long as that takes no more than a small share of the time.
"""

import time
from collections.abc import Callable

from adaptation.buffers import HeldBackText
from adaptation.change import TrafficChange
from adaptation.judging import Judge

_SHARE = 0.02  # of the time


class AskedTexts:
    """`clock` is in seconds."""

    def __init__(self, change: TrafficChange, judge: Judge, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._change = change
        self._judge = judge
        self._clock = clock
        self._quiet_until = -float("inf")

    def hear(self, text: HeldBackText, *, judges: bool) -> bool:
        """Hear of a text; whether the traffic has changed."""
        if judges:
            return self._change.observe(self._judge.anchor([text])[0])
        began = self._clock()
        if began < self._quiet_until:
            return False
        score = self._judge.anchor_once(text)
        now = self._clock()
        self._quiet_until = now + (now - began) / _SHARE
        return self._change.observe(score)

    def suspect(self) -> None:
        """Something else has changed: half the evidence is enough now."""
        self._change.suspect()

    def start_anew(self) -> None:
        """The traffic has changed, as others know."""
        self._change.start_anew()
