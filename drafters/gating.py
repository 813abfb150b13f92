"""Whether something whose gain is uncertain may go on: a drafter in this step, a further block, following the texts.
Gains and losses are entered in a ledger, counted in plain steps. What has lost it all is suspended, and tried again
once a small share of the time since has saved up for a trial: at most that share and the opening balance are lost."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from drafters.readback import Clock, Observe, Timestamp

OPENING = 3.0
LIMIT = 8.0
SHARE = 0.01
TRIAL = 2.0
_WHOLE_FOR = 4  # sequences: what fewer gain is so uneven that a bad beginning must not decide
_SMALLEST = 0.25  # of a whole one, so that what has lost for many is not forgotten for minutes
_RENEWAL = 0.5  # of the opening balance; a successor is much like what it replaces

_EDGES = (0.3, 1.0, 2.5)  # tokens per sequence expected of the cheaper drafters
_DRAFTER_OPENING = 2.0  # for each range of them

_FOLLOW_RATE = 1 / 16
_SELDOM = 0.1  # of recent steps with trees; trials of what does not pay are rarer
_PERIOD = 1024  # steps with trees
_FOLLOWED = 128  # of each period, come what may

_BLOCK_RATE = 0.05
_BLOCK_TRIALS = 8  # blocks before anything is decided, for each size of batch
_PROBE_SHARE = 0.005  # of all seconds, for blocks that do not seem to pay
_YIELD_PRIOR = (1.0, 1.0)  # tokens that came of starts, and those expected of them
_YIELD_MEMORY = 0.98


class LossLedger:
    """One balance, in plain steps."""

    def __init__(
        self, *, opening: float = OPENING, limit: float = LIMIT, share: float = SHARE, trial: float = TRIAL
    ) -> None:
        """Plain steps: what it begins with, the most it can have, what each step without it adds, and what it takes to
        open again."""
        self.balance = opening  # below 0 a debt
        self.is_open = opening > 0.0  # else suspended
        self._limit = limit
        self._share = share
        self._trial = trial

    def opens_within(self, steps: int) -> bool:
        """Whether it is open, or will be after so many steps without it."""
        return self.is_open or self.balance + steps * self._share >= self._trial

    def rest(self) -> None:
        """A step went by without it."""
        self.settle(self._share)

    def renew(self, opening: float) -> None:
        """Something else is behind it from now on: it has at least so much to be tried with."""
        self.balance = max(self.balance, opening)
        self.is_open = self.is_open or self.balance > 0.0

    def settle(self, gain: float) -> None:
        """A step went by with it, which gained so many plain steps, or lost them where it is negative."""
        self.balance = min(self._limit, self.balance + gain)
        self.is_open = self.balance > 0.0 if self.is_open else self.balance >= self._trial


class LedgersBySize:
    """One ledger for each size of batch, in powers of two: a step's gain is a mean over its sequences, so with more of
    them go a smaller variance, opening balance and share. What is suspended for many begins so for twice as many."""

    def __init__(self, *, opening: float = OPENING) -> None:
        self._opening = opening
        self._ledgers: dict[int, LossLedger] = {}

    def of(self, num_sequences: int) -> LossLedger:
        size = num_sequences.bit_length()
        if size not in self._ledgers:
            weight, smaller = _weight(size), self._ledgers.get(size - 1)
            part = min(1.0, weight)  # of a whole balance
            opening = part * self._opening
            if smaller is not None and not smaller.is_open and 2 ** (size - 2) > _WHOLE_FOR:
                opening = min(opening, 0.0, smaller.balance)
            self._ledgers[size] = LossLedger(
                opening=opening, limit=weight * LIMIT, share=part * SHARE, trial=part * TRIAL
            )
        return self._ledgers[size]

    def renew(self) -> None:
        """Something else is behind them all from now on: what was lost says little of it."""
        for size, ledger in self._ledgers.items():
            ledger.renew(_RENEWAL * min(1.0, _weight(size)) * self._opening)


def _weight(size: int) -> float:
    """How unevenly batches of so many bits gain, four sequences being 1."""
    return max(_SMALLEST, _WHOLE_FOR / (1 << (size - 1)))


class DrafterGate:
    """Whether a costly drafter is asked in this step: the tokens only it had right, against the seconds it took; by the
    tokens expected of the cheaper drafters and by how many sequences draft together."""

    def __init__(self, clock: Clock = perf_counter) -> None:
        self._clock = clock
        self._ledgers: defaultdict[int, LedgersBySize] = defaultdict(lambda: LedgersBySize(opening=_DRAFTER_OPENING))
        self._asked: tuple[LossLedger, Timestamp] | None = None  # in this step
        self._answered: Timestamp = clock()

    def ask(self, expected: float, batch: int = 1) -> bool:
        """Whether to ask the drafter for so many sequences, when so many tokens are expected of the others for each."""
        ledger = self._ledgers[sum(expected >= edge for edge in _EDGES)].of(batch)
        if ledger.is_open:
            self._answered = self._clock()
            self._asked = ledger, self._answered
            return True
        ledger.rest()
        self._asked = None
        return False

    def renew(self) -> None:
        """The drafter is another one from now on."""
        for ledgers in self._ledgers.values():
            ledgers.renew()

    def answered(self) -> None:
        """The drafter has answered."""
        if self._asked is not None:
            self._answered = self._clock()

    def end(self) -> Observe | None:
        """The step has ended. What is returned is to be told, sooner or later, how many of its emitted tokens were
        accepted on this drafter's word alone, and how many there were; None where it was not asked."""
        asked, self._asked = self._asked, None
        if asked is None:
            return None
        (ledger, began), answered, ended = asked, self._answered, self._clock()

        def settle(counts: Sequence[float]) -> None:
            extra, emitted = counts
            whole, seconds = ended - began, answered - began
            if whole > seconds:
                ledger.settle((extra * whole / max(1, emitted) - seconds) / (whole - seconds))

        return settle


class FollowGate:
    """Whether a costly drafter follows the texts, which costs time in every step, asked or not. One that is seldom
    asked is suspended; now and then it follows for a while, to be able to show what it gains."""

    def __init__(self) -> None:
        self._asked = 1.0
        self._num_steps = 0

    @property
    def is_open(self) -> bool:
        return self._asked > _SELDOM or self._num_steps % _PERIOD >= _PERIOD - _FOLLOWED

    def step(self, *, asked: bool) -> None:
        """A step with trees has ended."""
        self._num_steps += 1
        self._asked += _FOLLOW_RATE * (asked - self._asked)


@dataclass(slots=True)
class _BlockStep:
    """A step whose outcome is not known yet."""

    size: int  # of its batch
    began: Timestamp
    expected: float = 0.0  # of the starts of its further blocks
    blocks: list[tuple[Timestamp, Timestamp]] = field(default_factory=list)  # when further ones began and were there


class BlockGate:
    """Whether a tree gets a further block: only when the tokens expected of it save more seconds than it takes (SALF's
    stopping rule, in seconds), all of them measured while serving; now and then one is drafted that does not pay."""

    def __init__(self, clock: Clock = perf_counter) -> None:
        self._clock = clock
        self._came, self._expected = _YIELD_PRIOR
        self._block_seconds: dict[int, float] = {}  # by powers of two of the batch
        self._trials: dict[int, int] = {}
        self._token_seconds = 0.0
        self._spare_seconds = 0.0  # saved up for probes
        self._step = _BlockStep(0, clock())
        self._block_began = self._step.began

    def begin(self, batch: int) -> None:
        """A step's drafting begins, for so many sequences."""
        self._step = _BlockStep(batch.bit_length(), self._clock())

    def further(self, expected: float) -> bool:
        """Whether to draft one more block, with so many tokens expected of its starts, over the batch."""
        if not self._pays(expected):
            return False
        self._block_began = self._clock()
        self._step.expected += expected
        return True

    def drafted(self) -> None:
        """The block that `further` allowed is there."""
        self._trials[self._step.size] = self._trials.get(self._step.size, 0) + 1
        self._step.blocks.append((self._block_began, self._clock()))

    def end(self) -> Observe:
        """The step has ended. What is returned is to be told, sooner or later, how many of its emitted tokens were
        accepted from further blocks, and how many there were."""
        step, ended = self._step, self._clock()
        self._step = _BlockStep(step.size, ended)
        return partial(self._settle, step, ended)

    def _settle(self, step: _BlockStep, ended: Timestamp, counts: Sequence[float]) -> None:
        came_true, emitted = counts
        for began, there in step.blocks:
            seconds = there - began
            before = self._block_seconds.get(step.size, seconds)
            self._block_seconds[step.size] = before + _BLOCK_RATE * (seconds - before)
        seconds = ended - step.began
        if emitted > 0:
            token_seconds = seconds / emitted
            before = self._token_seconds or token_seconds
            self._token_seconds = before + _BLOCK_RATE * (token_seconds - before)
        self._spare_seconds += _PROBE_SHARE * seconds
        if step.expected > 0.0:
            self._came = _YIELD_MEMORY * self._came + came_true
            self._expected = _YIELD_MEMORY * self._expected + step.expected

    def _pays(self, expected: float) -> bool:
        size = self._step.size
        if self._trials.get(size, 0) < _BLOCK_TRIALS or size not in self._block_seconds:
            return True
        tokens = expected * self._came / self._expected
        loss = self._block_seconds[size] - tokens * self._token_seconds
        if loss <= 0.0:
            return True
        if self._spare_seconds < loss:
            return False
        self._spare_seconds = 0.0
        return True
