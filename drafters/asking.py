"""Whether to run further forwards in this step: a network beside the memory, or more blocks of a tree.

A `StepDecision` (drafters/decision.py) by expected tokens and size of batch: the gain is the accepted tokens that
nothing else proposed, less the seconds by which the step got longer."""

from bisect import bisect
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
_TOKENS_NOISE = 0.5  # steps that one more drafter's tokens save, of one sequence: most are known anyway, or wrong


@dataclass(slots=True)
class Step:
    """One step: the forwards asked for, its seconds and its outcome; the last two become known in any order."""

    batch: int = 1
    account: str = "greedy"
    situation: int | None = None  # range of expected tokens at the first question; None: there was none
    asked: list[tuple[GainPosterior, float]] = field(default_factory=list)  # each with its expected tokens
    seconds: float | None = None
    outcome: Sequence[float] | None = None  # accepted tokens that nothing else proposed, and emitted tokens

    @property
    def key(self) -> tuple[int | None, str]:
        """Steps of one key take the same time without further forwards."""
        return self.situation, self.account


class AskGate:
    """Asks for further forwards while they may gain. A step is `begin`, any number of `ask`, then `end` and `timed` in
    any order.

    What a step takes without them, in log seconds, is observed in steps that do not ask. Sequences at temperature 0
    have an account of their own: what they gain must not pay for what sampled ones lose."""

    def __init__(self, name: str, ledger: RegretLedger) -> None:
        self._decision = StepDecision(name, ledger, noise=_TOKENS_NOISE, baseline=(0.0, _UNKNOWN_TIME))
        self._step = Step()
        self._last_seconds = 0.0  # seconds of the last step; 0 before the first
        self.on_weights_changed: Callable[[], None] = self._decision.widen

    @property
    def may_gain(self) -> bool:
        """Whether asking may gain for batches like the last one, whatever is expected."""
        return self._may_gain(self._step.account)

    def can_afford_sequence(self, *, warm: bool) -> bool:
        """Whether asking may gain, and the ledger covers a trial, for a sequence that begins."""
        account = _account_of(warm=warm)
        return self._may_gain(account) and self._decision.can_afford(account, TRIAL_STEPS, self._last_seconds)

    def begin(self, batch: int, *, warm: bool) -> None:
        """Begin a step with so many sequences; `warm`: whether a temperature is above 0."""
        self._step = Step(batch, _account_of(warm=warm))

    def ask(self, expected: float, *, can_answer: bool = True) -> bool:
        """Whether to run one more forward, with so many tokens expected per sequence."""
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
        """Callback for the outcome of the step's trees, to be called now or later; None if nothing was asked. It gets
        the accepted tokens that nothing else proposed, and the emitted tokens."""
        return partial(self._observe, self._step) if self._step.asked else None

    def timed(self, times: StepTimes, *, followed: bool = True) -> None:
        """Record the times of the step. `followed`: whether this decision caused its `follow_seconds`."""
        step, self._step = self._step, Step(self._step.batch, self._step.account)
        if times.reads_prompts:
            if followed:
                self._decision.settle(step.account, -times.follow_seconds, self._last_seconds)
        elif step.situation is not None:
            self._last_seconds = step.seconds = times.seconds
            self._conclude(step)

    def _observe(self, step: Step, outcome: Sequence[float]) -> None:
        step.outcome = outcome
        self._conclude(step)

    def _conclude(self, step: Step) -> None:
        """Learn from a step once its seconds and, if something was asked, its outcome are known. If several forwards
        were asked for, time is shared equally and tokens by what was expected of each."""
        baseline = self._decision.baseline(step.batch, step.key)
        if step.seconds is not None and not step.asked:
            baseline.observe(log(step.seconds))
        if step.seconds is None or step.outcome is None or not baseline.is_observed:
            return
        extra, emitted = step.outcome
        baseline.advance()
        without = exp(baseline.mean)
        saved, longer = extra * step.seconds / max(1.0, emitted), step.seconds - without
        self._decision.settle(step.account, saved - longer, self._last_seconds)
        expected, equal = sum(tokens for _, tokens in step.asked), 1.0 / len(step.asked)
        for gain, tokens in step.asked:
            share = tokens / expected if expected else equal
            gain.observe((saved * share - longer * equal) / without)

    def _may_gain(self, account: str) -> bool:
        """Whether any situation may gain; True if none was observed."""
        situations = range(len(_EXPECTED_EDGES) + 1)
        known = [self._decision.may_gain(self._step.batch, (situation, account)) for situation in situations]
        return any(known) or all(one is None for one in known)

    def _needs_baseline(self, gain: GainPosterior) -> bool:
        """Whether to skip the forward once, to measure a step without it."""
        without = self._decision.baseline(self._step.batch, self._step.key)
        return self._last_seconds > 0.0 and self._decision.needs_baseline(gain, without.sd)


def _account_of(*, warm: bool) -> str:
    return "drawn" if warm else "greedy"


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
        """Whether to run this further forward, counted from 0. # survival [batch, starts], of its start nodes"""
        self._survivals[number].read(survival.sum()[None] / len(survival), partial(self._observe, number))
        return self._gate.ask(self._expected[number])

    def end(self, outcome: Tensor | None) -> None:
        """Pass on what became of the step's trees; None if there were none. # outcome [2]: accepted tokens from further
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
    time than it takes (`AskGate`), and that stops reading texts while it does not pay."""

    def __init__(self, drafter: Drafter, sizes: DraftingSizes) -> None:
        self.drafter = drafter
        self.tokens = {"memory": 0, drafter.name: 0}  # accepted so far, by who proposed them
        self._gate = AskGate(drafter.name, sizes.ledger)
        self._survivals = readback.readback_of(sizes.device)
        self._expected = 0.0  # accepted tokens per sequence, by the last memory's tree that was read back
        self._ran = False  # whether it ran in this step
        self._follows = True  # whether it reads texts

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Begin to read these sequences, if the ledger covers the time for a whole text."""
        if contexts:  # a text that it has not read from its beginning tells it too little
            warm = any(context.warm for context in contexts)
            self._follows = self.drafter.ready and self._gate.can_afford_sequence(warm=warm)
        self.drafter.start(contexts)

    def read(self, read: Read) -> None:
        """Read a chunk of a prompt."""
        self.drafter.read(read if self._follows else replace(read, follow=False))

    def propose(self, rows: Tensor, noise: Noise, survival: Tensor) -> Candidates | None:
        """The network's candidates, if it runs in this step. # rows [batch] int64; survival [batch, nodes], of the
        memory's tree"""
        if not self.drafter.ready:
            return None
        batch = rows.shape[0]
        self._gate.begin(batch, warm=noise.warm)
        self._survivals.read(survival.sum()[None] / max(1, batch), self._observe_expected)
        self._ran = self._gate.ask(self._expected, can_answer=self._follows)
        return self.drafter.grow(rows, noise) if self._ran else None

    def end_step(self) -> Observe | None:
        """Called once per step when its tokens are committed. Returns the callback for the number of tokens that only
        the network had right and the number of committed tokens; None if it did not run."""
        observe, self._ran = self._gate.end() if self._ran else None, False
        return observe

    def commit(self, committed: Committed) -> None:
        """Append a step's committed tokens."""
        self._follows = self._follows and self._gate.may_gain
        self.drafter.commit(committed if self._follows else replace(committed, follow=False))

    def credit(self, alone: int, accepted: int, committed: int, observe: Observe | None) -> None:
        """Credit the network with the accepted tokens that the memory's own tree did not have.
        `alone`: accepted tokens that the memory's own tree had; `observe`: as returned by `end_step`."""
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

    def _observe_expected(self, expected: Sequence[float]) -> None:
        (self._expected,) = expected
