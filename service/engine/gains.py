"""What drafting gains, in plain steps per step: of each kind of text by size of batch, of each text by its own steps.

Texts differ by their temperature and by whether a grammar binds them, and from one another. A kind that may gain
is drafted for, except for texts whose own steps say that it loses there; a kind that loses is not, except for texts
whose own steps speak for a gain: those that may be unlike the others get some steps to show it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean
from typing import Any

from drafters.regret import TRIAL_STEPS, GainPosterior, PosteriorsBySize

BETWEEN_TEXTS = 0.5
"""Standard deviation of texts' mean gains about their kind's: accepted lengths of real texts differed by 0.1 to 0.9
(docs/budget.md)."""
_DAY_SECONDS = 86_400.0
"""Traffic repeats by the day at best: what was learnt so long ago says no more than a prior."""


@dataclass(slots=True)
class TextGain:
    """What is known of drafting for one text."""

    kind: str = ""
    own: GainPosterior | None = None  # by its own steps, once it has drafted
    trial_steps: int = 0  # for which it is drafted for though its kind loses


def kind_of(temperature: float, *, has_grammar: bool) -> str:
    """The texts among which drafting is expected to gain alike."""
    heat = "greedy" if temperature == 0.0 else "cool" if temperature <= 0.8 else "warm"
    return f"{heat}+grammar" if has_grammar else heat


class DraftGains:
    """For which texts the drafter is worth asking."""

    def __init__(self) -> None:
        self._kinds = PosteriorsBySize()
        self._suspended: set[tuple[str, int]] = set()  # kinds and sizes of batches

    def of(self, num_sequences: int, kind: str = "") -> GainPosterior:
        return self._kinds.of(num_sequences, kind)

    def asks(
        self,
        texts: Sequence[TextGain],
        num_sequences: int,
        *,
        begins: bool,
        affordable: Collection[str],
        trials: Collection[str] = (),
    ) -> list[bool]:
        """For which of these texts to draft in a step of so many sequences.

        A suspended kind is tried again when a text begins (`begins`): a drafter knows little of a text that it has not
        followed from there on, so that a trial in the middle would speak against any. `affordable`: kinds for which the
        ledger covers the worst case of a step; `trials`: of `TRIAL_STEPS`.
        """
        size, open_kinds = num_sequences.bit_length(), set[str]()
        for kind in {text.kind for text in texts}:
            is_open = kind in affordable and (begins or (kind, size) not in self._suspended)
            if is_open and self.of(num_sequences, kind).may_gain:
                open_kinds.add(kind)
                self._suspended.discard((kind, size))
            else:
                self._suspended.add((kind, size))
        if begins:
            for text in texts:
                is_tried = text.own is None and text.kind in trials and text.kind not in open_kinds
                if is_tried and _may_promise_a_text(self.of(num_sequences, text.kind)):
                    text.trial_steps = TRIAL_STEPS
        return [text.kind in affordable and _is_worth(text, is_open=text.kind in open_kinds) for text in texts]

    def observe(
        self,
        texts: Sequence[TextGain],
        gains: Sequence[float],
        own_gains: Sequence[float],
        num_sequences: int,
        *,
        all_asked: bool,
    ) -> None:
        """Take in what a step gained for each of the texts that drafted in it.

        `gains` share out what the step took longer; `own_gains` are what leaving just this text out would have lost.
        `all_asked`: whether all that decoded in the step drafted.
        """
        for text in texts:
            text.trial_steps -= text.trial_steps > 0
            if text.own is None:
                text.own = GainPosterior(mean=self.of(num_sequences, text.kind).mean, sd=BETWEEN_TEXTS)
        kinds = {text.kind for text in texts}
        for kind in kinds:
            of_kind = [gain for text, gain in zip(texts, gains, strict=True) if text.kind == kind]
            posterior = self.of(num_sequences, kind)
            # The presumed noise is that of a mean over the whole batch.
            whole = all_asked and len(kinds) == 1
            posterior.observe(fmean(of_kind), None if whole else posterior.noise * sqrt(num_sequences / len(of_kind)))
        for text, gain in zip(texts, own_gains, strict=True):
            assert text.own is not None
            text.own.observe(gain)

    def elapse(self, texts: Sequence[TextGain], num_sequences: int) -> None:
        """A step went by in which these texts did not draft."""
        for kind in {text.kind for text in texts}:
            self.of(num_sequences, kind).advance()
        for text in texts:
            if text.own is not None:
                text.own.advance()

    def on_weights_changed(self) -> None:
        """Other weights draft from now on: means stay, nothing is sure."""
        self._kinds.widen()
        self._suspended.clear()

    def state(self) -> list[Any]:
        """What is known by kind and size, as JSON."""
        return self._kinds.state()

    def restore(self, state: list[Any], age_seconds: float) -> None:
        """Take up what was known so long ago. Raises ValueError, TypeError for anything else."""
        self._kinds.restore(state, min(1.0, age_seconds / _DAY_SECONDS))


def _is_worth(text: TextGain, *, is_open: bool) -> bool:
    if is_open:
        return text.own is None or text.own.may_gain
    return text.trial_steps > 0 or (text.own is not None and text.own.mean > 0.0)


def _may_promise_a_text(gain: GainPosterior) -> bool:
    """Whether drafting may gain for one text of a kind for which it gains so much in the mean."""
    return GainPosterior(mean=gain.mean, sd=hypot(gain.sd, BETWEEN_TEXTS)).may_gain
