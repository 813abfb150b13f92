"""Whether a costly drafter is worth asking in this step: tokens only it had right, against the seconds it took.

Keeps separate books by how much the cheaper drafters promise, because a sure copy leaves nothing to gain. A drafter
that does not pay is asked again now and then, for texts change. A matter of speed only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

_EDGES = (0.3, 1.0, 2.5)  # tokens per sequence that the cheaper drafters promise
_MEMORY = 0.95  # per observation
_TRIAL = 12  # observations before anything is decided
_SILENCE = 20  # steps without being asked before it is asked again


@dataclass(slots=True)
class _Book:
    gained: float = 0.0  # seconds saved by tokens that nobody else proposed
    spent: float = 0.0  # seconds the drafter took
    observed: int = 0
    silent: int = 0

    def note(self, gained: float, spent: float) -> None:
        self.gained = _MEMORY * self.gained + gained
        self.spent = _MEMORY * self.spent + spent
        self.observed += 1

    def is_worth(self) -> bool:
        if self.observed < _TRIAL or self.gained >= self.spent or self.silent >= _SILENCE:
            self.silent = 0
            return True
        self.silent += 1
        return False


class Worth:
    """Books of one drafter, by promise of the others."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._books = [_Book() for _ in range(len(_EDGES) + 1)]
        self._open: tuple[_Book, float, float] | None = None  # book, time when asked, seconds it took
        self.num_asked = 0
        self.num_passed_over = 0

    def ask(self, promised: float) -> bool:
        """Whether to ask the drafter, when the others promise so many tokens per sequence."""
        book = self._books[sum(promised >= edge for edge in _EDGES)]
        worth = book.is_worth()
        self.num_asked += worth
        self.num_passed_over += not worth
        self._open = (book, self._clock(), 0.0) if worth else None
        return worth

    def answered(self) -> None:
        """The drafter has answered."""
        if self._open is not None:
            book, asked, _ = self._open
            self._open = (book, asked, self._clock() - asked)

    def settle(self, extra: int, emitted: int) -> None:
        """The step has ended: `extra` of its `emitted` tokens were accepted on this drafter's word alone."""
        if self._open is not None:
            book, asked, spent = self._open
            seconds = self._clock() - asked
            book.note(extra * seconds / max(1, emitted), spent)
            self._open = None
