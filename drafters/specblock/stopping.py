"""Whether a tree gets a further block: only when the tokens it promises are worth more seconds than it takes (SALF's
stopping rule, in seconds).

The promise of a block's starts is what the tree itself says; what a promise is worth, what a block takes and what a
token takes are measured while serving. Now and then a block is drafted that does not pay, so that it can pay again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from drafters.readback import Clock, Observe, Timestamp

_RATE = 0.05
_TRIAL = 8  # blocks before anything is decided, for each size of batch
_PROBE_SHARE = 0.005  # of all seconds, for blocks that do not seem to pay
_YIELD_PRIOR = (1.0, 1.0)  # tokens that came of starts, and what those starts had promised
_MEMORY = 0.98


@dataclass(slots=True)
class _Step:
    """A step whose outcome is not known yet."""

    size: int  # of its batch
    began: Timestamp
    promise: float = 0.0  # of the starts of its further blocks
    blocks: list[tuple[Timestamp, Timestamp]] = field(default_factory=list)  # when further ones began and were there


class Stopping:
    """The measured side of the rule; one per drafter."""

    def __init__(self, clock: Clock = perf_counter) -> None:
        self._clock = clock
        self._came, self._promised = _YIELD_PRIOR
        self._block_seconds: dict[int, float] = {}  # by powers of two of the batch
        self._trials: dict[int, int] = {}
        self._token_seconds = 0.0
        self._spare_seconds = 0.0  # saved up for probes
        self._step = _Step(0, clock())
        self._block_began = self._step.began

    def begin(self, batch: int) -> None:
        """A step's drafting begins, for so many sequences."""
        self._step = _Step(batch.bit_length(), self._clock())

    def further(self, promise: float) -> bool:
        """Whether to draft one more block, whose starts are reached with these odds, added up over the batch."""
        if not self._pays(promise):
            return False
        self._block_began = self._clock()
        self._step.promise += promise
        return True

    def drafted(self) -> None:
        """The block that `further` allowed is there."""
        self._trials[self._step.size] = self._trials.get(self._step.size, 0) + 1
        self._step.blocks.append((self._block_began, self._clock()))

    def end(self) -> Observe:
        """The step has ended. What is returned is to be told, sooner or later, how many of its emitted tokens were
        accepted from further blocks, and how many there were."""
        step, ended = self._step, self._clock()
        self._step = _Step(step.size, ended)
        return partial(self._settle, step, ended)

    def _settle(self, step: _Step, ended: Timestamp, known: Sequence[float]) -> None:
        came_true, emitted = known
        for began, there in step.blocks:
            seconds = there - began
            expected = self._block_seconds.get(step.size, seconds)
            self._block_seconds[step.size] = expected + _RATE * (seconds - expected)
        seconds = ended - step.began
        if emitted > 0:
            token_seconds = seconds / emitted
            before = self._token_seconds or token_seconds
            self._token_seconds = before + _RATE * (token_seconds - before)
        self._spare_seconds += _PROBE_SHARE * seconds
        if step.promise > 0.0:
            self._came = _MEMORY * self._came + came_true
            self._promised = _MEMORY * self._promised + step.promise

    def _pays(self, promise: float) -> bool:
        size = self._step.size
        if self._trials.get(size, 0) < _TRIAL or size not in self._block_seconds:
            return True
        tokens = promise * self._came / self._promised
        loss = self._block_seconds[size] - tokens * self._token_seconds
        if loss <= 0.0:
            return True
        if self._spare_seconds < loss:
            return False
        self._spare_seconds = 0.0
        return True
