"""Decides whether to run further forwards in a step: a network in addition to the memory, or further blocks of a tree.

Gains are learned by a `StepDecision` (drafters/decision.py) for each range of expected tokens and batch size. A gain is
the time saved by accepted tokens that nothing else proposed, minus the time that the forwards added to the step."""

from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, log

from torch import Tensor

from drafters import readback
from drafters.decision import TRIAL_STEPS, GainPosterior, RegretLedger, StepDecision
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise, Read, StepTimes
from drafters.readback import Observe
from drafters.tree import Candidates

_EXPECTED_EDGES = (0.1, 0.3, 1.0, 2.5)  # expected tokens per sequence
_UNKNOWN_TIME = 8.0  # e-folds: a step may take microseconds or minutes
_TOKENS_NOISE = 0.5  # presumed standard deviation of steps saved per sequence: most extra tokens are known or wrong
_MOST_TIMES = 1.5  # cap on the seconds of a baseline's step, as a multiple of the step before: a hiccup hardly counts
_PACE_KEPT = 1.0 - 1.0 / 128.0  # per step, of the sums that the seconds per token follow from: as posteriors forget


@dataclass(slots=True)
class Step:
    """Record of one step, from which `AskGate` learns. Its seconds and its outcome become known in either order."""

    batch: int = 1
    account: str = "greedy"
    situation: int | None = None  # range of expected tokens at the first `ask`; None: not called
    asked: list[tuple[GainPosterior, float]] = field(default_factory=list)  # forwards that run; expected tokens
    seconds: float | None = None
    without: float = 0.0  # `seconds`, capped at a multiple of the step before
    outcome: Sequence[float] | None = None  # accepted tokens that nothing else proposed, and emitted tokens

    @property
    def key(self) -> tuple[int | None, str]:
        """Key of the baseline: steps with the same key take about the same time without further forwards."""
        return self.situation, self.account


class AskGate:
    """Allows further forwards while they may gain. Calls per step: `begin`, any number of `ask`, `end`, then `timed`,
    before or after the next step's `end`. A step in which nothing is asked needs `end` alone.

    The baseline, the log seconds of a step without further forwards, is observed in steps that run none. Batches at
    temperature 0 have an account of their own, so that their gains do not pay for losses of sampled batches."""

    def __init__(self, name: str, ledger: RegretLedger) -> None:
        self._decision = StepDecision(name, ledger, noise=_TOKENS_NOISE, baseline=(0.0, _UNKNOWN_TIME))
        self._paces: dict[str, tuple[float, float]] = {}  # seconds and emitted tokens of recent steps, by account
        self._step = Step()
        self._ended = deque([self._step], maxlen=2)  # the last two steps
        self._last_seconds = 0.0  # seconds of the last step; 0 before the first
        self.on_weights_changed: Callable[[], None] = self._decision.widen

    @property
    def may_gain(self) -> bool:
        """Whether a further forward may gain, for batches like the last one and any number of expected tokens."""
        return self._may_gain(self._step.account)

    def can_afford_sequence(self, *, warm: bool) -> bool:
        """Whether, for a new sequence, further forwards may gain and the ledger covers a trial of TRIAL_STEPS steps."""
        account = _account_of(warm=warm)
        return self._may_gain(account) and self._decision.can_afford(account, TRIAL_STEPS, self._last_seconds)

    def begin(self, batch: int, *, warm: bool) -> None:
        """Begin a step of `batch` sequences; `warm`: whether any temperature is above 0."""
        self._step = Step(batch, _account_of(warm=warm))

    def ask(self, expected: float, *, can_answer: bool = True) -> bool:
        """Decide whether to run one more forward. `expected`: tokens per sequence that it is expected to add;
        `can_answer`: False if the drafter cannot run in this step."""
        step, situation = self._step, bisect(_EXPECTED_EDGES, expected)
        gain = self._decision.gain(step.batch, (situation, step.account))
        is_first = step.situation is None
        if is_first:
            step.situation = situation
        acts = can_answer and gain.may_gain and self._decision.can_afford(step.account, 1.0, self._last_seconds)
        if not acts or (is_first and self._needs_baseline(gain)):
            gain.advance()
            return False
        step.asked.append((gain, expected))
        return True

    def end(self) -> Observe | None:
        """End the step. Returns a callback for the outcome of its trees: the accepted tokens that nothing else
        proposed, and the emitted tokens. Returns None if no further forward ran."""
        step, self._step = self._step, Step(self._step.batch, self._step.account)
        self._ended.append(step)
        return partial(self._observe, step) if step.asked else None

    def timed(self, times: StepTimes, *, followed: bool = True) -> None:
        """Record the times of a step. `followed`: whether its `follow_seconds` were spent because of this gate."""
        step = self._ended[0 if times.is_passed else -1]
        if times.reads_prompts:
            if followed:
                self._decision.settle(step.account, -times.follow_seconds, self._last_seconds)
        elif step.situation is not None:
            step.without = min(times.seconds, _MOST_TIMES * (self._last_seconds or times.seconds))
            self._last_seconds = step.seconds = times.seconds
            self._conclude(step)

    def _observe(self, step: Step, outcome: Sequence[float]) -> None:
        step.outcome = outcome
        self._conclude(step)

    def _conclude(self, step: Step) -> None:
        """Learn from a step once its seconds and, if further forwards ran, its outcome are known. Several forwards
        share the added time equally, and the saved time in proportion to their expected tokens."""
        baseline = self._decision.baseline(step.batch, step.key)
        if step.seconds is not None and not step.asked:
            baseline.observe(log(step.without))
        if step.seconds is None or step.outcome is None or not baseline.is_observed:
            return
        if not self._paces:  # the first forward is not typical: it allocates what later ones reuse
            self._paces[step.account] = 0.0, 0.0
            return
        extra, emitted = step.outcome
        baseline.advance()
        without = exp(baseline.mean)
        per_token = self._seconds_per_token(step.account, step.seconds, emitted)
        saved, longer = extra * per_token, step.seconds - without
        self._decision.settle(step.account, saved - longer, self._last_seconds)
        expected, equal = sum(tokens for _, tokens in step.asked), 1.0 / len(step.asked)
        for gain, tokens in step.asked:
            share = tokens / expected if expected else equal
            gain.observe((saved * share - longer * equal) / without)

    def _seconds_per_token(self, account: str, step_seconds: float, emitted: float) -> float:
        """Return the mean seconds per token of recent steps with further forwards, this one included. With this value
        of a token the mean gain is positive exactly if such steps emit more tokens a second than those without."""
        seconds, tokens = self._paces.get(account, (0.0, 0.0))
        seconds, tokens = seconds * _PACE_KEPT + step_seconds, tokens * _PACE_KEPT + max(1.0, emitted)
        self._paces[account] = seconds, tokens
        return seconds / tokens

    def _may_gain(self, account: str) -> bool:
        """Whether a forward may gain in any range of expected tokens; True if none was observed yet."""
        situations = range(len(_EXPECTED_EDGES) + 1)
        known = [self._decision.may_gain(self._step.batch, (situation, account)) for situation in situations]
        return any(known) or all(one is None for one in known)

    def _needs_baseline(self, gain: GainPosterior) -> bool:
        """Whether to skip the forward in this step, to measure the time of a step without it."""
        without = self._decision.baseline(self._step.batch, self._step.key)
        return self._last_seconds > 0.0 and self._decision.needs_baseline(gain, without.sd)


def _account_of(*, warm: bool) -> str:
    return "drawn" if warm else "greedy"


class ForwardGates:
    """Decides on the further forwards of a tree one by one, by the survival of the nodes at which each would start. On
    a GPU, survival is read back one step late."""

    def __init__(self, further: int, sizes: DraftingSizes) -> None:
        """`further`: maximum number of forwards after the first."""
        self._gate = AskGate("blocks", sizes.ledger)
        self._survivals = [readback.readback_of(sizes.device) for _ in range(further)]
        self._expected = [1.0] * further  # per sequence, as last read back
        self._outcomes = readback.readback_of(sizes.device)
        self.begin, self.on_weights_changed = self._gate.begin, self._gate.on_weights_changed

    def ask(self, number: int, survival: Tensor) -> bool:
        """Decide whether to run further forward `number`, from 0. # survival [batch, starts], of its start nodes"""
        self._survivals[number].read(survival.sum()[None] / len(survival), partial(self._observe, number))
        return self._gate.ask(self._expected[number])

    def end(self, outcome: Tensor | None) -> None:
        """End the step; `outcome` is None if no trees were drafted. # outcome [2]: accepted tokens from further
        forwards, and all committed tokens"""
        observe = self._gate.end()
        if observe is not None and outcome is not None:
            self._outcomes.read(outcome, observe)

    def timed(self, times: StepTimes) -> None:
        """Record the times of the step."""
        self._gate.timed(times, followed=False)

    def _observe(self, number: int, expected: Sequence[float]) -> None:
        (self._expected[number],) = expected


class GatedNetwork:
    """A drafter that runs in a step only if the tokens that it adds to the memory's tree are expected to save more
    time than its forwards take (`AskGate`). While it does not pay, it does not read sequences either."""

    def __init__(self, drafter: Drafter, sizes: DraftingSizes) -> None:
        self.drafter = drafter
        self.tokens = {"memory": 0, drafter.name: 0}  # accepted tokens so far, by the drafter that proposed them
        self._gate = AskGate(drafter.name, sizes.ledger)
        self._survivals = readback.readback_of(sizes.device)
        self._expected = 0.0  # expected accepted tokens per sequence of the last memory tree that was read back
        self._follows = True  # whether the network reads the running sequences

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Start these sequences. The network reads them if it may gain and the ledger covers a trial."""
        if contexts:  # the network is of little use for a sequence that it has not read from the start
            warm = any(context.warm for context in contexts)
            self._follows = self.drafter.ready and self._gate.can_afford_sequence(warm=warm)
        self.drafter.start(contexts)

    def read(self, read: Read) -> None:
        """Pass a chunk of a prompt to the network, which runs only if it reads this sequence."""
        self.drafter.read(read if self._follows else replace(read, follow=False))

    def propose(self, rows: Tensor, noise: Noise, survival: Tensor) -> Candidates | None:
        """Return the network's candidates, or None if it does not run in this step. # rows [batch] int64; survival
        [batch, nodes], of the memory's tree"""
        if not self.drafter.ready:
            return None
        batch = rows.shape[0]
        self._gate.begin(batch, warm=noise.warm)
        self._survivals.read(survival, self._observe_expected)
        runs = self._gate.ask(self._expected, can_answer=self._follows)
        return self.drafter.grow(rows, noise) if runs else None

    def end_step(self) -> Observe | None:
        """End the step, before `commit`. Returns the callback for `credit`, or None if the network did not run."""
        return self._gate.end()

    def commit(self, committed: Committed) -> None:
        """Pass a step's committed tokens to the network."""
        if committed.follow:  # else nothing is asked, so that nothing changes
            self._follows = self._follows and self._gate.may_gain
            committed = committed if self._follows else replace(committed, follow=False)
        self.drafter.commit(committed)

    def credit(self, alone: int, accepted: int, committed: int, observe: Observe | None) -> None:
        """Credit the network with the accepted tokens that the memory's own tree did not contain. `alone`: number of
        accepted tokens that it did contain; `observe`: the result of `end_step`."""
        extra = max(0, accepted - alone) if observe is not None else 0
        self.tokens["memory"] += accepted - extra
        self.tokens[self.drafter.name] += extra
        if observe is not None:
            observe((extra, committed))

    def timed(self, times: StepTimes) -> None:
        """Record the times of the step."""
        self._gate.timed(times, followed=self._follows)
        self.drafter.timed(times)

    def on_weights_changed(self) -> None:
        """Called after the network's weights were replaced."""
        self._gate.on_weights_changed()
        self._follows = self.drafter.ready
        self.drafter.on_weights_changed()

    def _observe_expected(self, survival: Sequence[Sequence[float]]) -> None:
        self._expected = sum(map(sum, survival)) / max(1, len(survival))  # survival [batch, nodes]
