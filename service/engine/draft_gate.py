"""Whether to draft, for each sequence: posteriors of what drafting gains, in plain steps per step, under a ledger that
bounds what drafting may lose (drafters/regret.py).

A traffic class (temperature and grammar) has one posterior per batch size, each sequence one of its own. A class that
may gain drafts, except for sequences whose own steps show a loss; a class that loses does not, except for sequences
whose own steps show a gain. New sequences of a losing class get a few trial steps where the ledger covers them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean
from typing import Any

from drafters.regret import TRIAL_STEPS, GainPosterior, PosteriorsBySize, RegretLedger, StepAccount
from service.engine.stats import DraftingOutlook

DRAFTING = "drafting"
"""Prefix of the ledger's accounts, one per traffic class: gains of one class do not pay for losses of another."""
BETWEEN_SEQUENCES = 0.5
"""Standard deviation of sequences' mean gains within a class: accepted lengths of real texts differed by 0.1 to 0.9
(docs/budget.md)."""
_DAY_SECONDS = 86_400.0
"""Traffic repeats by the day at best: what was learnt that long ago is no more than a prior."""


@dataclass(slots=True)
class SequenceGain:
    """What is known of drafting for one sequence."""

    traffic: str = ""  # its class
    own: GainPosterior | None = None  # from its own steps, once it has drafted
    trial_steps: int = 0  # steps left in which it drafts although its class loses

    @property
    def drafts_against_its_class(self) -> bool:
        """Whether it drafts although its class loses."""
        return self.trial_steps > 0 or (self.own is not None and self.own.mean > 0.0)


def traffic_class(temperature: float, *, has_grammar: bool) -> str:
    """The class of sequences that are expected to gain alike from drafting."""
    heat = "greedy" if temperature == 0.0 else "cool" if temperature <= 0.8 else "warm"
    return f"{heat}+grammar" if has_grammar else heat


class DraftGate:
    """Decides for which sequences the drafter runs: where drafting may gain and the ledger covers the worst case."""

    def __init__(self, ledger: RegretLedger, single_step_seconds: float) -> None:
        """`single_step_seconds`: a plain step of one sequence, the unit of the ledger's accounts."""
        self._ledger, self._single_step_seconds = ledger, single_step_seconds
        self._accounts: dict[str, StepAccount] = {}  # by traffic class
        self._gains = PosteriorsBySize()
        self._suspended: set[tuple[str, int]] = set()  # traffic classes by size of batch

    def gain(self, num_sequences: int, traffic: str = "") -> GainPosterior:
        """Posterior of a class's mean gain in batches of this size."""
        return self._gains.of(num_sequences, traffic)

    def select(self, sequences: Sequence[SequenceGain], *, starts: bool, step_seconds: float) -> list[bool]:
        """Choose which of a step's sequences draft.

        `step_seconds`: what a step takes, the most that one with drafts can lose. A suspended class is tried again only
        when a sequence starts (`starts`): a drafter that has not followed a sequence from its start knows little of it,
        so a trial in the middle would tell against any drafter.
        """
        num_sequences, open_classes = len(sequences), set[str]()
        size = num_sequences.bit_length()
        classes = {one.traffic for one in sequences}
        affordable = {traffic for traffic in classes if self._account(traffic).can_afford(1.0, step_seconds)}
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
            one.traffic in affordable
            and ((one.own is None or one.own.may_gain) if one.traffic in open_classes else one.drafts_against_its_class)
            for one in sequences
        ]

    def needs_plain_step(self, sequences: Sequence[SequenceGain], num_sequences: int, baseline_sd: float) -> bool:
        """Whether a plain step would tell more than another one with drafts: the baseline's standard deviation is the
        larger part of the doubt in a gain whose sign is unknown."""
        gains = [self.gain(num_sequences, traffic) for traffic in {one.traffic for one in sequences}]
        return any(baseline_sd > gain.sd and not gain.is_sign_known(baseline_sd) for gain in gains)

    def observe(
        self,
        sequences: Sequence[SequenceGain],
        gains: Sequence[float],
        own_gains: Sequence[float],
        num_sequences: int,
        *,
        all_drafted: bool,
    ) -> None:
        """Take in what a step gained for each sequence that drafted in it, in plain steps.

        `gains` share the step's extra time equally; `own_gains` count what leaving this one sequence out would have
        lost. `all_drafted`: whether all decoding sequences of the step drafted.
        """
        for one in sequences:
            one.trial_steps -= one.trial_steps > 0
            if one.own is None:
                one.own = GainPosterior(mean=self.gain(num_sequences, one.traffic).mean, sd=BETWEEN_SEQUENCES)
        classes = {one.traffic for one in sequences}
        for traffic in classes:
            of_class = [gain for one, gain in zip(sequences, gains, strict=True) if one.traffic == traffic]
            posterior = self.gain(num_sequences, traffic)
            # The presumed noise is that of a mean over the whole batch.
            is_whole = all_drafted and len(classes) == 1
            noise = None if is_whole else posterior.noise * sqrt(num_sequences / len(of_class))
            posterior.observe(fmean(of_class), noise)
        for one, gain in zip(sequences, own_gains, strict=True):
            assert one.own is not None
            one.own.observe(gain)

    def skip(self, sequences: Sequence[SequenceGain], num_sequences: int) -> None:
        """Count a step in which these sequences did not draft: what is known of them ages."""
        for traffic in {one.traffic for one in sequences}:
            self.gain(num_sequences, traffic).advance()
        for one in sequences:
            if one.own is not None:
                one.own.advance()

    def settle(self, traffic: str, gained_seconds: float) -> None:
        """Enter what a step gained, or lost below 0, in the account of a traffic class."""
        self._account(traffic).record(gained_seconds, self._single_step_seconds)

    def on_weights_changed(self) -> None:
        """Keep the means but no certainty: what the old weights gained says little of the new ones."""
        self._gains.widen()
        self._suspended.clear()

    def outlook(self, sequences: Sequence[SequenceGain], num_sequences: int) -> DraftingOutlook:
        """What is believed of drafting for these sequences, for metrics."""
        gains = [self.gain(num_sequences, one.traffic) for one in sequences]
        accounts = self._accounts.values()
        return DraftingOutlook(
            sequences=1 << (num_sequences.bit_length() - 1),
            gain=fmean(gain.mean for gain in gains),
            gain_sd=fmean(gain.sd for gain in gains),
            balance_seconds=sum(account.balance_seconds for account in accounts),
            lost_seconds=sum(account.lost_seconds for account in accounts),
        )

    def state(self) -> list[Any]:
        """All class posteriors as JSON, for `restore`."""
        return self._gains.state()

    def restore(self, state: list[Any], age_seconds: float) -> None:
        """Begin with posteriors saved `age_seconds` ago, widened by their age; raises ValueError or TypeError for
        anything else, and then keeps what it has."""
        gains = PosteriorsBySize()
        gains.restore(state, min(1.0, age_seconds / _DAY_SECONDS))
        self._gains = gains
        self._suspended.clear()

    def _account(self, traffic: str) -> StepAccount:
        if traffic not in self._accounts:
            self._accounts[traffic] = StepAccount(f"{DRAFTING} {traffic}", self._ledger)
        return self._accounts[traffic]

    def _grant_trial(self, one: SequenceGain, num_sequences: int, step_seconds: float) -> None:
        """Give a new sequence of a losing class its trial, if it may be unlike the others and the ledger covers it."""
        of_class = self.gain(num_sequences, one.traffic)
        of_one = GainPosterior(mean=of_class.mean, sd=hypot(of_class.sd, BETWEEN_SEQUENCES))
        if self._account(one.traffic).can_afford(TRIAL_STEPS, step_seconds) and of_one.may_gain:
            one.trial_steps = TRIAL_STEPS
