"""Whether to ask a network in addition to the memory, or for further blocks, in this step: posteriors of the gain by
batch size and situation (drafters/regret.py). Acts where the gain may be positive and the ledger can afford the loss of
a step, and learns from what steps took and emitted."""

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp, log

from torch import Tensor

from drafters import readback
from drafters.protocol import DraftingSizes, StepTimes
from drafters.readback import Observe
from drafters.regret import TRIAL_STEPS, GainPosterior, PosteriorsBySize, RegretLedger, StepAccount

_EXPECTED_EDGES = (0.1, 0.3, 1.0, 2.5)  # expected tokens per sequence
_TIME_NOISE = 0.1  # standard deviation of log seconds among steps of one situation
_TIME_DRIFT = _TIME_NOISE**2 / 512  # after 512 steps without a comparison it is as uncertain as after one
_UNKNOWN_TIME = 8.0  # e-folds: a step may take microseconds or minutes
_TOKENS_NOISE = 0.5  # steps that one more drafter's tokens save, of one sequence: most are known anyway, or wrong


@dataclass(slots=True)
class Step:
    """One step: what was asked for, its seconds and its outcome; the last two become known in any order."""

    batch: int = 1
    account: Hashable = None  # the account that a loss is recorded in
    situation: Hashable = None  # in which it was first decided whether to ask; None: it was not decided
    asked: list[tuple[GainPosterior, float]] = field(default_factory=list)  # each with its expected tokens
    seconds: float | None = None
    outcome: Sequence[float] | None = None  # as the rule's `end` says


class AskPolicy(ABC):
    """Decides by posteriors and a ledger whether to ask, and learns from each step. A step is `begin` or `choose`, then
    `end` once it is known what was accepted, then `took`."""

    def __init__(self, accounts: Mapping[Hashable, str], ledger: RegretLedger, noise: float = 1.0) -> None:
        """`accounts`: names of the ledger's accounts; `noise`: standard deviation of one sequence's gain, in steps."""
        self._accounts = {key: StepAccount(name, ledger) for key, name in accounts.items()}
        self._gains = PosteriorsBySize(noise)  # in steps, by situation
        self._step = Step()
        self._last_seconds = 0.0  # of a step; 0 before the first

    def end(self) -> Observe | None:
        """Return a callback for the outcome of the step's trees, to be called now or later; None where nothing was
        asked. Its numbers are those of the rule's `conclude`."""
        return partial(self._observe, self._step) if self._step.asked else None

    def timed(self, times: StepTimes, *, followed: bool = True) -> None:
        """Take in the times of the step. `followed`: whether its `follow_seconds` were spent for what is decided
        here."""
        step, self._step = self._step, Step(self._step.batch, self._step.account)
        if times.reads_prompts:
            if followed:
                self._accounts[step.account].record(-times.follow_seconds, self.step_seconds(step.batch))
        elif step.situation is not None:
            self._last_seconds = step.seconds = times.seconds
            self.conclude(step)

    def on_weights_changed(self) -> None:
        """Keep the means of gains, but make them as uncertain as at first."""
        self._gains.widen()

    def can_afford(self, steps: float, account: Hashable) -> bool:
        """Whether the account covers the loss of so many steps like the last one."""
        return self._accounts[account].can_afford(steps, self.step_seconds(self._step.batch))

    def step_seconds(self, batch: int) -> float:
        """Seconds of a step of so many sequences; 0 where unknown."""
        return self._last_seconds

    @abstractmethod
    def conclude(self, step: Step) -> None:
        """Learn from a step once its seconds and, where something was asked, its outcome are known."""

    def _observe(self, step: Step, outcome: Sequence[float]) -> None:
        step.outcome = outcome
        self.conclude(step)


class AskGate(AskPolicy):
    """Asks for further tokens while that may gain: the accepted tokens that nothing else proposed, against the seconds
    by which asking lengthens a step. A situation is a range of expected tokens and whether a temperature is above 0.

    Seconds without asking are observed in steps that do not ask. Such a step is taken when their uncertainty is the
    larger part of the uncertainty of a gain whose sign is not known."""

    def __init__(self, account: str, ledger: RegretLedger) -> None:
        # What sequences at temperature 0 gain must not pay for what sampled ones lose.
        super().__init__({False: f"{account} greedy", True: f"{account} drawn"}, ledger, _TOKENS_NOISE)
        self._step = Step(account=False)
        self._without: dict[tuple[int, Hashable], GainPosterior] = {}  # log seconds, by size of batch and situation

    @property
    def may_gain(self) -> bool:
        """Whether asking may gain for batches like the last one, whatever is expected."""
        return self._may_gain(warm=bool(self._step.account))

    def can_afford_sequence(self, *, warm: bool) -> bool:
        """Whether asking may gain, and the ledger covers a trial, for a sequence that begins."""
        return self._may_gain(warm=warm) and self.can_afford(TRIAL_STEPS, warm)

    def begin(self, batch: int, *, warm: bool) -> None:
        """Begin a step with so many sequences; `warm`: whether a temperature is above 0."""
        self._step = Step(batch, warm)

    def ask(self, expected: float, *, can_answer: bool = True) -> bool:
        """Return whether to ask, with so many tokens expected per sequence; may be called several times in a step."""
        step = self._step
        situation = bisect(_EXPECTED_EDGES, expected), step.account
        gain = self._gains.of(step.batch, situation)
        is_first = step.situation is None
        if is_first:
            step.situation = situation
        acts = can_answer and gain.may_gain and self.can_afford(1.0, step.account)
        if not acts or (is_first and self._wants_comparison(gain, self._without.get(_size_and_situation(step)))):
            gain.advance()
            return False
        step.asked.append((gain, expected))
        return True

    def conclude(self, step: Step) -> None:
        """Record what the step gained. Its outcome is (accepted tokens that nothing else proposed, emitted tokens). If
        several forwards were asked for, time is shared equally and tokens by what was expected of each."""
        key = _size_and_situation(step)
        if step.seconds is not None and not step.asked:
            self._without.setdefault(key, _log_seconds()).observe(log(step.seconds))
        baseline = self._without.get(key)
        if step.seconds is None or step.outcome is None or baseline is None:
            return
        extra, emitted = step.outcome
        baseline.advance()
        without = exp(baseline.mean)
        saved, longer = extra * step.seconds / max(1.0, emitted), step.seconds - without
        self._accounts[step.account].record(saved - longer, self._last_seconds)
        expected, equal = sum(tokens for _, tokens in step.asked), 1.0 / len(step.asked)
        for gain, tokens in step.asked:
            share = tokens / expected if expected else equal
            gain.observe((saved * share - longer * equal) / without)

    def _may_gain(self, *, warm: bool) -> bool:
        situations = [(expected, warm) for expected in range(len(_EXPECTED_EDGES) + 1)]
        return self._gains.may_gain(self._step.batch, situations)

    def _wants_comparison(self, gain: GainPosterior, without: GainPosterior | None) -> bool:
        if without is None:
            return self._last_seconds > 0.0
        return without.sd >= gain.sd and not gain.is_sign_known(without.sd)


class ForwardGates:
    """Asks for the further forwards of a tree one by one, by the survival of the nodes at which each would start. On a
    device survival is known one step late."""

    def __init__(self, further: int, sizes: DraftingSizes) -> None:
        """`further`: most forwards after the first."""
        self._gate = AskGate("blocks", sizes.ledger)
        self._survivals = [readback.readback_of(sizes.device) for _ in range(further)]
        self._expected = [1.0] * further  # per sequence, as last read back
        self._outcomes = readback.readback_of(sizes.device)
        self.begin, self.on_weights_changed = self._gate.begin, self._gate.on_weights_changed

    def ask(self, number: int, survival: Tensor) -> bool:
        """Return whether to run this further forward, counted from 0. # survival [batch, starts], of its start nodes"""
        self._survivals[number].read(survival.sum()[None] / len(survival), partial(self._observe, number))
        return self._gate.ask(self._expected[number])

    def end(self, outcome: Tensor | None) -> None:
        """Take in what became of the step's trees; None where there were none. # outcome [2]: accepted tokens from
        further forwards, and all committed tokens"""
        observe = self._gate.end()
        if observe is not None and outcome is not None:
            self._outcomes.read(outcome, observe)

    def timed(self, times: StepTimes) -> None:
        """Take in the times of the step."""
        self._gate.timed(times, followed=False)

    def _observe(self, number: int, expected: Sequence[float]) -> None:
        (self._expected[number],) = expected


def _size_and_situation(step: Step) -> tuple[int, Hashable]:
    return step.batch.bit_length(), step.situation


def _log_seconds() -> GainPosterior:
    return GainPosterior(sd=_UNKNOWN_TIME, noise=_TIME_NOISE, drift=_TIME_DRIFT)
