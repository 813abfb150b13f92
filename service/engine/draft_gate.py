"""Decides which sequences draft. The gain of drafting, in plain steps per step, is estimated by traffic class and by
sequence; a ledger bounds the losses (drafters/decision.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean
from typing import Any

from drafters.decision import TRIAL_STEPS, GainPosterior, RegretLedger, StepDecision, bucket_of
from service.engine.stats import DraftingOutlook

DRAFTING = "drafting"
"""Prefix of the ledger's accounts, one per traffic class: gains of one class do not pay for losses of another."""
BETWEEN_SEQUENCES = 0.5
"""Standard deviation of sequences' mean gains within a class: accepted lengths of real texts differed by 0.1 to 0.9
(docs/budget.md)."""
_DAY_SECONDS = 86_400.0
"""Age at which restored posteriors are as uncertain as the prior: traffic repeats daily at best."""
_BASELINE_STEPS = 2.0
"""Longest step with drafts that hardly pays, in plain steps: an error of the baseline counts up to so many times."""


@dataclass(slots=True, eq=False)
class SequenceGain:
    """State of the drafting decision for one sequence."""

    traffic: str = ""  # traffic class of the sequence
    may_draft: bool = True  # False if the request disables speculation
    own: GainPosterior | None = None  # gain of the sequence's own steps; None before it has drafted
    trial_steps: int = 0  # remaining steps in which the sequence drafts although its class loses

    @property
    def may_draft_alone(self) -> bool:
        """Whether the sequence may draft although its class loses."""
        return self.trial_steps > 0 or (self.own is not None and self.own.mean > 0.0)

    def drafts(self, *, class_may_gain: bool) -> bool:
        """Whether the sequence drafts, by the gain of its own steps and of its class."""
        if class_may_gain:
            return self.own is None or self.own.may_gain
        return self.may_draft_alone


def traffic_class(temperature: float, *, has_grammar: bool, is_filtered: bool = False) -> str:
    """Name of a sequence's traffic class; sequences of one class are expected to gain alike from drafting.
    `is_filtered`: whether top_k, top_p or min_p drop tokens, so that a draft is right about as often as at 0.7."""
    heat = "greedy" if temperature == 0.0 else "cool" if temperature <= 0.8 or is_filtered else "warm"
    return f"{heat}+grammar" if has_grammar else heat


class DraftGate:
    """Decides for which sequences the drafter runs.

    A traffic class (temperature and grammar) has one posterior per batch-size bucket, each sequence has its own. A
    class that may gain drafts, except for sequences whose own steps show a loss; a class that loses does not, except
    for sequences whose own steps show a gain. New sequences of a losing class get a few trial steps if the ledger
    covers them.
    """

    def __init__(self, ledger: RegretLedger, single_step_seconds: float) -> None:
        """`single_step_seconds`: seconds of a plain step of one sequence, the unit of the ledger's accounts."""
        self.decision = StepDecision(DRAFTING, ledger)  # keyed by traffic class
        self._single_step_seconds = single_step_seconds
        self._suspended: set[tuple[str, int]] = set()  # suspended traffic classes, each with its batch-size bucket

    def gain(self, num_sequences: int, traffic: str = "") -> GainPosterior:
        """Posterior of a class's mean gain in batches of this size."""
        return self.decision.gain(num_sequences, traffic)

    def choose(self, sequences: Sequence[SequenceGain], *, starts: bool, step_seconds: float) -> list[bool]:
        """Choose which of a step's sequences draft.

        `step_seconds`: seconds of a step, the maximum that a step with drafts can lose. A suspended class is tried
        again only when a sequence starts (`starts`): a drafter that has not read a sequence from its start drafts it
        badly, so a trial in the middle would underestimate any drafter.
        """
        num_sequences, open_classes = len(sequences), set[str]()
        size = bucket_of(num_sequences)
        classes = {one.traffic for one in sequences}
        affordable = {traffic for traffic in classes if self.decision.can_afford(traffic, 1.0, step_seconds)}
        for traffic in classes:
            may_open = traffic in affordable and (starts or (traffic, size) not in self._suspended)
            if may_open and self.gain(num_sequences, traffic).may_gain:
                open_classes.add(traffic)
                self._suspended.discard((traffic, size))
            else:
                self._suspended.add((traffic, size))
        if starts:
            for one in sequences:
                if one.own is None and one.traffic not in open_classes:
                    self._grant_trial(one, num_sequences, step_seconds)
        return [
            one.traffic in affordable and one.drafts(class_may_gain=one.traffic in open_classes) for one in sequences
        ]

    def needs_plain_step(self, sequences: Sequence[SequenceGain], num_sequences: int) -> bool:
        """Whether a plain step would now tell more about the gain than another step with drafts."""
        gains = [self.gain(num_sequences, traffic) for traffic in {one.traffic for one in sequences}]
        deviation = _BASELINE_STEPS * self.decision.baseline(num_sequences).sd
        return any(self.decision.needs_baseline(gain, deviation) for gain in gains)

    def observe(
        self,
        sequences: Sequence[SequenceGain],
        gains: Sequence[float],
        own_gains: Sequence[float],
        num_sequences: int,
        *,
        all_drafted: bool,
        noisier: float = 1.0,
    ) -> None:
        """Update the posteriors by a step's gains, in plain steps, one per sequence that drafted in it.

        `gains` share the step's extra time equally, for the classes; `own_gains` charge each sequence only the time
        that leaving it out would have saved. `all_drafted`: whether all decoding sequences of the step drafted;
        `noisier`: noise of these gains, as a multiple of that in a step without prompts.
        """
        for one in sequences:
            one.trial_steps -= one.trial_steps > 0
            if one.own is None:
                one.own = GainPosterior(mean=self.gain(num_sequences, one.traffic).mean, sd=BETWEEN_SEQUENCES)
        classes = {one.traffic for one in sequences}
        for traffic in classes:
            of_class = [gain for one, gain in zip(sequences, gains, strict=True) if one.traffic == traffic]
            posterior = self.gain(num_sequences, traffic)
            # The posterior's noise applies to a mean over the whole batch; a mean over fewer sequences is noisier.
            is_usual = all_drafted and len(classes) == 1 and noisier == 1.0
            noise = None if is_usual else posterior.noise * noisier * sqrt(num_sequences / len(of_class))
            posterior.observe(fmean(of_class), noise)
        for one, gain in zip(sequences, own_gains, strict=True):
            assert one.own is not None
            one.own.observe(gain, None if noisier == 1.0 else one.own.noise * noisier)

    def skip(self, sequences: Sequence[SequenceGain], num_sequences: int, steps: int = 1) -> None:
        """Make the posteriors of these sequences less certain, after steps in which they did not draft."""
        for traffic in {one.traffic for one in sequences}:
            self.gain(num_sequences, traffic).advance(steps)
        for one in sequences:
            if one.own is not None:
                one.own.advance(steps)

    def settle(self, traffic: str, gained_seconds: float) -> None:
        """Enter the seconds that a step gained, negative for a loss, in the account of a traffic class."""
        self.decision.settle(traffic, gained_seconds, self._single_step_seconds)

    def on_weights_changed(self) -> None:
        """Keep the means but widen them to the prior's uncertainty: the new weights may gain more or less."""
        self.decision.widen()
        self._suspended.clear()

    def outlook(self, sequences: Sequence[SequenceGain], num_sequences: int) -> DraftingOutlook:
        """Expected gain of drafting for these sequences, for metrics."""
        gains = [self.gain(num_sequences, one.traffic) for one in sequences]
        balance, lost = self.decision.totals()
        return DraftingOutlook(
            sequences=1 << (bucket_of(num_sequences) - 1),
            gain=fmean(gain.mean for gain in gains),
            gain_sd=fmean(gain.sd for gain in gains),
            balance_seconds=balance,
            lost_seconds=lost,
        )

    def restore(self, state: Any, age_seconds: float) -> None:
        """Continue from a state of `decision` that is `age_seconds` old; the older it is, the less certain it becomes.
        Raises the same errors as `StepDecision.restore`."""
        self.decision.restore(state, min(1.0, age_seconds / _DAY_SECONDS), self._single_step_seconds)
        self._suspended.clear()

    def _grant_trial(self, one: SequenceGain, num_sequences: int, step_seconds: float) -> None:
        """Grant trial steps to a new sequence of a losing class, if this sequence may still gain and the ledger covers
        the trial."""
        of_class = self.gain(num_sequences, one.traffic)
        of_one = GainPosterior(mean=of_class.mean, sd=hypot(of_class.sd, BETWEEN_SEQUENCES))
        if self.decision.can_afford(one.traffic, TRIAL_STEPS, step_seconds) and of_one.may_gain:
            one.trial_steps = TRIAL_STEPS
