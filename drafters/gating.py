"""Whether something costly is asked for more tokens in this step: a network beside lookup, or further blocks of it. By
the tokens only it had right against the seconds it took, for each range of tokens expected where it is asked."""

from bisect import bisect
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from drafters.readback import Clock, Observe, Timestamp
from drafters.regret import GainPosterior, PosteriorsBySize

_EDGES = (0.1, 0.3, 1.0, 2.5)  # expected tokens per sequence
_NOISE = 0.5  # steps that tokens of one more drafter save, of one sequence: most are had by the other, or wrong


@dataclass(slots=True)
class _Asked:
    posterior: GainPosterior
    expected: float
    began: Timestamp
    there: Timestamp


class AskGate:
    """Asks while that promises a gain. What it loses is in the whole step's seconds, and so in the ledger of drafting:
    it is not entered twice."""

    def __init__(self, clock: Clock = perf_counter) -> None:
        self._clock = clock
        self._gains = PosteriorsBySize(_NOISE)  # in steps without it, by range of the tokens expected
        self._began = clock()
        self._asked: list[_Asked] = []  # in this step
        self._batch = 1

    @property
    def promises(self) -> bool:
        """Whether it may be asked for batches like the last one, whatever is expected."""
        return self._gains.promises(self._batch)

    def begin(self, batch: int) -> None:
        """A step's drafting begins, for so many sequences."""
        self._began, self._asked, self._batch = self._clock(), [], batch

    def ask(self, expected: float, *, can_answer: bool = True) -> bool:
        """Whether to ask, where so many tokens are expected per sequence."""
        posterior = self._gains.of(self._batch, bisect(_EDGES, expected))
        if not (can_answer and posterior.promises):
            posterior.elapse()
            return False
        now = self._clock()
        self._asked.append(_Asked(posterior, expected, now, now))
        return True

    def answered(self) -> None:
        """What was asked last has answered."""
        self._asked[-1].there = self._clock()

    def end(self) -> Observe | None:
        """The step has ended. What is returned is to be told, sooner or later, how many of its emitted tokens were
        accepted on this word alone, and how many there were; None where it was not asked."""
        asked, self._asked = self._asked, []
        return partial(_settle, asked, self._began, self._clock()) if asked else None

    def renew(self) -> None:
        """Other weights answer from now on."""
        self._gains.widen()


def _settle(asked: list[_Asked], began: Timestamp, ended: Timestamp, counts: tuple[float, float]) -> None:
    """Of several the tokens are shared out as they were expected."""
    extra, emitted = counts
    seconds = [one.there - one.began for one in asked]
    whole, expected = ended - began, sum(one.expected for one in asked)
    without = whole - sum(seconds)
    if without <= 0.0:
        return
    for one, taken in zip(asked, seconds, strict=True):
        share = one.expected / expected if expected else 1.0 / len(asked)
        one.posterior.observe((extra * share * whole / max(1.0, emitted) - taken) / without)
