"""Whether a costly drafter is worth asking in this step: tokens only it had right, against the seconds it took.

Keeps separate books by how much the cheaper drafters promise, because a sure copy leaves nothing to gain, and by how
many sequences draft together. A drafter that does not pay is asked again now and then, for texts change. A matter of
speed only.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from drafters.purse import Purse, PursesBySize
from drafters.readback import Clock, Observe, Timestamp

_EDGES = (0.3, 1.0, 2.5)  # tokens per sequence that the cheaper drafters promise
_ALLOWANCE = 2.0  # for each book; there are several


@dataclass(slots=True)
class _Asked:
    """A question whose worth is not known yet."""

    purse: Purse
    at: Timestamp
    answered: Timestamp


class Worth:
    """Books of one drafter, by promise of the others and by load."""

    def __init__(self, clock: Clock = perf_counter) -> None:
        self._clock = clock
        self._purses: defaultdict[int, PursesBySize] = defaultdict(lambda: PursesBySize(allowance=_ALLOWANCE))
        self._open: _Asked | None = None
        self.num_asked = 0
        self.num_passed_over = 0

    def ask(self, promised: float, batch: int = 1) -> bool:
        """Whether to ask the drafter for so many sequences, when the others promise so many tokens for each."""
        purse = self._purses[sum(promised >= edge for edge in _EDGES)].of(batch)
        if purse.is_open:
            self.num_asked += 1
            now = self._clock()
            self._open = _Asked(purse, now, now)
            return True
        purse.rest()
        self.num_passed_over += 1
        self._open = None
        return False

    def renew(self) -> None:
        """The drafter is another one from now on."""
        for purses in self._purses.values():
            purses.renew()

    def answered(self) -> None:
        """The drafter has answered."""
        if self._open is not None:
            self._open.answered = self._clock()

    def end(self) -> Observe | None:
        """The step has ended. What is returned is to be told, sooner or later, how many of its emitted tokens were
        accepted on this drafter's word alone, and how many there were; None where it was not asked."""
        asked, self._open = self._open, None
        return None if asked is None else partial(_settle, asked, self._clock())


def _settle(asked: _Asked, ended: Timestamp, known: Sequence[float]) -> None:
    extra, emitted = known
    whole, seconds = ended - asked.at, asked.answered - asked.at
    if whole > seconds:
        asked.purse.settle((extra * whole / max(1, emitted) - seconds) / (whole - seconds))
