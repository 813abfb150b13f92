"""Whether a tree gets a further block: only when the tokens it promises are worth more seconds than it takes (SALF's
stopping rule, in seconds).

The promise of a block's starts is what the tree itself says; what a promise is worth, what a block takes and what a
token takes are measured while serving. Now and then a block is drafted that does not pay, so that it can pay again.
"""

from collections.abc import Callable
from time import perf_counter

_RATE = 0.05
_TRIAL = 8  # blocks before anything is decided, for each size of batch
_PROBE_SHARE = 0.005  # of all seconds, for blocks that do not seem to pay
_YIELD_PRIOR = (1.0, 1.0)  # tokens that came of starts, and what those starts had promised
_MEMORY = 0.98


class Stopping:
    """The measured side of the rule; one per drafter."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._came, self._promised = _YIELD_PRIOR
        self._block_seconds: dict[int, float] = {}  # by powers of two of the batch
        self._trials: dict[int, int] = {}
        self._token_seconds = 0.0
        self._spare_seconds = 0.0  # saved up for probes
        self._step_began = self._block_began = 0.0
        self._open_promise = 0.0
        self._size = 0

    def begin(self, batch: int) -> None:
        """A step's drafting begins, for so many sequences."""
        self._step_began = self._clock()
        self._open_promise = 0.0
        self._size = batch.bit_length()

    def further(self, promise: float) -> bool:
        """Whether to draft one more block, whose starts are reached with these odds, added up over the batch."""
        if not self._pays(promise):
            return False
        self._block_began = self._clock()
        self._open_promise += promise
        return True

    def drafted(self) -> None:
        """The block that `further` allowed is there."""
        seconds = self._clock() - self._block_began
        self._trials[self._size] = self._trials.get(self._size, 0) + 1
        expected = self._block_seconds.get(self._size, seconds)
        self._block_seconds[self._size] = expected + _RATE * (seconds - expected)

    def settle(self, came_true: int, emitted: int) -> None:
        """The step has ended: so many of its emitted tokens were accepted from further blocks."""
        seconds = self._clock() - self._step_began
        if emitted > 0:
            token_seconds = seconds / emitted
            before = self._token_seconds or token_seconds
            self._token_seconds = before + _RATE * (token_seconds - before)
        self._spare_seconds += _PROBE_SHARE * seconds
        if self._open_promise > 0.0:
            self._came = _MEMORY * self._came + came_true
            self._promised = _MEMORY * self._promised + self._open_promise

    def _pays(self, promise: float) -> bool:
        if self._trials.get(self._size, 0) < _TRIAL:
            return True
        tokens = promise * self._came / self._promised
        loss = self._block_seconds[self._size] - tokens * self._token_seconds
        if loss <= 0.0:
            return True
        if self._spare_seconds < loss:
            return False
        self._spare_seconds = 0.0
        return True
