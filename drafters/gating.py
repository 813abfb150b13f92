"""Whether something costly is asked for more tokens in this step: a network beside the memory, or further blocks of it.
By the tokens only it had right against the seconds that steps take longer with it, for each range of tokens expected
where it is asked; and what it may lose against steps without it is the ledger's to say, as of all actions."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp, log

from torch import Tensor

from drafters import readback
from drafters.protocol import DraftingSizes, StepTimes
from drafters.readback import Observe
from drafters.regret import TRIAL_STEPS, GainPosterior, PosteriorsBySize, RegretLedger, StepAccount

_EDGES = (0.1, 0.3, 1.0, 2.5)  # expected tokens per sequence
_TIME_NOISE = 0.1  # of what a step takes, beside others of its kind
_TIME_DRIFT = _TIME_NOISE**2 / 512  # after 512 steps without a comparison it is as uncertain as after one
_UNKNOWN = 8.0  # e-folds: a step may take microseconds or minutes
_NOISE = 0.5  # steps that tokens of one more drafter save, of one sequence: most are had by the other, or wrong


Kind = tuple[int, bool]
"""Range of the tokens expected, and whether a temperature is above 0."""


@dataclass(slots=True)
class _Step:
    """One step: who was asked, what it took, and what came of it, in whichever order that becomes known."""

    batch: int = 1
    warm: bool = False  # whether a temperature is above 0: what is drawn is foretold more rarely
    kind: Kind | None = None  # where somebody might be asked first
    asked: list[tuple[GainPosterior, float]] = field(default_factory=list)  # and tokens expected of each
    seconds: float | None = None
    counts: tuple[float, float] | None = None  # tokens that only those asked had right, and all that were emitted


class AskGate:
    """Asks while that promises a gain and the ledger covers it. Seconds without it are seen in steps without it: one
    is taken where their doubt is the larger part of the doubt in a gain that may be none, as plain ones are of
    drafting."""

    def __init__(self, account: str, ledger: RegretLedger) -> None:
        # What texts at temperature 0 gain does not pay for what drawn ones lose.
        self._accounts = {
            warm: StepAccount(f"{account} {'drawn' if warm else 'greedy'}", ledger) for warm in (False, True)
        }
        self._gains = PosteriorsBySize(_NOISE)  # in steps without it, by kind
        self._without: dict[tuple[int, Kind | None], GainPosterior] = {}  # log seconds, by size of batch and kind
        self._step = _Step()
        self._last_seconds = 0.0  # of a step; 0: nobody tells times

    @property
    def promises(self) -> bool:
        """Whether it may be asked for batches like the last one, whatever is expected."""
        return self._promises(warm=self._step.warm)

    def affords_text(self, *, warm: bool) -> bool:
        """Whether enough may be lost for a text from its beginning."""
        return self._promises(warm=warm) and self._accounts[warm].covers(TRIAL_STEPS, self._last_seconds)

    def begin(self, batch: int, *, warm: bool) -> None:
        """A step's drafting begins, for so many sequences."""
        self._step = _Step(batch, warm)

    def ask(self, expected: float, *, can_answer: bool = True) -> bool:
        """Whether to ask, where so many tokens are expected per sequence."""
        step = self._step
        kind = bisect(_EDGES, expected), step.warm
        gain = self._gains.of(step.batch, kind)
        is_first = step.kind is None
        if is_first:
            step.kind = kind
        acts = can_answer and gain.promises and self._accounts[step.warm].covers(1.0, self._last_seconds)
        if not acts or (is_first and self._wants_comparison(gain, self._without.get(_key(step)))):
            gain.elapse()
            return False
        step.asked.append((gain, expected))
        return True

    def end(self) -> Observe | None:
        """Of the step's trees it is known what was accepted. What is returned is to be told, sooner or later, how many
        of its emitted tokens were accepted on this word alone, and how many there were; None where it was not asked."""
        return partial(self._observe_counts, self._step) if self._step.asked else None

    def took(self, times: StepTimes, *, followed: bool = True) -> None:
        """What the step took, if one of its kind can be compared with others; `followed`: with taking in what was read
        and said."""
        step, self._step = self._step, _Step(self._step.batch, self._step.warm)
        if times.reads_prompts:
            self._accounts[step.warm].settle(-times.follow_seconds * followed, self._last_seconds)
        elif step.kind is not None:
            self._last_seconds = step.seconds = times.seconds
            if step.asked:
                self._conclude(step)
            else:
                self._without.setdefault(_key(step), _log_seconds()).observe(log(times.seconds))

    def renew(self) -> None:
        """Other weights answer from now on."""
        self._gains.widen()

    def _promises(self, *, warm: bool) -> bool:
        kinds = [(expected, warm) for expected in range(len(_EDGES) + 1)]
        return self._gains.promises(self._step.batch, kinds)

    def _wants_comparison(self, gain: GainPosterior, without: GainPosterior | None) -> bool:
        if without is None:
            return self._last_seconds > 0.0
        return without.sd >= gain.sd and not gain.is_sure_beside(without.sd)

    def _observe_counts(self, step: _Step, counts: tuple[float, float]) -> None:
        step.counts = counts
        self._conclude(step)

    def _conclude(self, step: _Step) -> None:
        """Enter what the step gained, once all of it is known. Of several that were asked each took as long, and the
        tokens are shared out as they were expected."""
        baseline = self._without.get(_key(step))
        if step.seconds is None or step.counts is None or baseline is None:
            return
        extra, emitted = step.counts
        baseline.elapse()
        without = exp(baseline.mean)
        saved, longer = extra * step.seconds / max(1.0, emitted), step.seconds - without
        self._accounts[step.warm].settle(saved - longer, self._last_seconds)
        expected, equal = sum(tokens for _, tokens in step.asked), 1.0 / len(step.asked)
        for gain, tokens in step.asked:
            share = tokens / expected if expected else equal
            gain.observe((saved * share - longer * equal) / without)


class ForwardGates:
    """Asks for the further forwards of a tree, one after the other, by the survival of the nodes at which each would
    start; a device tells it one step late."""

    def __init__(self, further: int, sizes: DraftingSizes) -> None:
        """`further`: most forwards behind the first."""
        self._gate = AskGate("blocks", sizes.ledger)
        self._survivals = [readback.readback_of(sizes.device) for _ in range(further)]
        self._expected = [1.0] * further  # per sequence, as last read back
        self._outcomes = readback.readback_of(sizes.device)
        self.begin, self.renew = self._gate.begin, self._gate.renew

    def ask(self, number: int, survival: Tensor) -> bool:
        """Whether to run this further forward, counted from 0, at nodes of such survival. # [batch, starts]"""
        self._survivals[number].read(survival.sum()[None] / len(survival), partial(self._observe, number))
        return self._gate.ask(self._expected[number])

    def end(self, came: Tensor | None) -> None:
        """What became of the step's trees, if there were any. # [2], accepted tokens that further forwards proposed,
        and all tokens"""
        observe = self._gate.end()
        if observe is not None and came is not None:
            self._outcomes.read(came, observe)

    def took(self, times: StepTimes) -> None:
        """What the step took."""
        self._gate.took(times, followed=False)

    def _observe(self, number: int, expected: Sequence[float]) -> None:
        (self._expected[number],) = expected


def _key(step: _Step) -> tuple[int, Kind | None]:
    return step.batch.bit_length(), step.kind


def _log_seconds() -> GainPosterior:
    return GainPosterior(sd=_UNKNOWN, noise=_TIME_NOISE, drift=_TIME_DRIFT)
