"""What drafting has gained or cost at each load, and so whether to draft at all.

Every step is compared with what a plain one of the same sequences takes, in which the drafter would not even have to
follow the texts; gains and losses go into a purse per size of batch (`drafters/purse.py`), so that a drafter that does
not pay costs a share of 1 % at most, whatever it claims. What it takes to follow the texts is owed by the drafts that
come of it; where none are to come for long, texts are not followed.
"""

from collections import defaultdict

import numpy as np

from drafters.purse import PursesBySize
from service.engine.costs.model import CostTable, DraftCosts, OnlineCosts, OnlineDraftCosts
from service.engine.load import Load, StepOutcome

_FIRST_REFERENCES = 2
_FIRST_PAUSE = 8
_LONGEST_PAUSE = 128
_LONGEST_CLEAR_PAUSE = 512
"""A size of batch begins with plain steps, and has others after so many steps with nodes, more and more of them: what
drafting gains is measured against what a plain step takes."""
_BESIDE_PROMPTS = 0.25
"""What a plain step counts that reads prompts too, for it says little of one that does not."""
_REFERENCES = 4
_CLEAR = 0.25
"""A plain step among others is slower than one of many in a row (caches hold the drafter), by a tenth on CPUs. It takes
several to know what plain decoding would take, unless drafting gains more plain steps per step than this."""
_UNSEEN = 0.05
"""Plain steps that a step with drafts costs beside what the clocks around its stages say, as measured with eight
sequences: caches that its rows leave cold, and prompts that are read in more and smaller parts."""
_LARGEST_SURPRISE = 1.5  # times what was expected: a hiccup is nobody's fault
_RATE = 0.05
_AHEAD = 64
"""Steps for which texts are followed before drafts are tried again: of texts it has not followed a drafter knows too
little to show what it is worth."""


class DraftGain:
    """Predicted seconds as corrected so far, and a book for each size of batch."""

    def __init__(self, costs: CostTable, drafts: DraftCosts) -> None:
        self.costs = OnlineCosts(costs)
        self._drafts = OnlineDraftCosts(drafts)
        self._purses = PursesBySize()
        self._books: defaultdict[int, _Book] = defaultdict(_Book)

    def refusal(self, load: Load) -> str | None:
        """Why drafting would be a waste in this step."""
        if not self._purses.of(load.num_sequences).is_open:
            return "stands_down"
        return "reference" if self._book(load).references_due else None

    def follows(self, load: Load) -> bool:
        """Whether it is worth following what this step reads and commits."""
        return self._purses.of(load.num_sequences).opens_within(_AHEAD)

    def plain_seconds(self, load: Load) -> float:
        """Of a plain step of the drafting sequences alone, without the prompts that are read beside them."""
        batch = max(1, load.num_drafting)
        verify = self.costs.verify_seconds(np.array([float(batch)]), load.context, batch)
        return float(verify[0]) + self._book(load).plain_other_seconds

    def draft_seconds(self, load: Load) -> float:
        return self._drafts.draft_seconds(max(1, load.num_drafting))

    def renew(self) -> None:
        """Other weights draft from now on: what the old ones lost says little of them."""
        self._purses.renew()

    def learn(self, outcome: StepOutcome) -> float:
        """Take in a step; returns the verify seconds that had been predicted."""
        load = outcome.load
        if outcome.followed:
            self._book(load).owed_seconds += outcome.follow_seconds
        if load.num_drafting:
            self._judge(self._book(load), outcome)
        rows = load.num_rows + outcome.num_nodes
        # After the judgement: what a step with drafts took must not become what a plain one would have taken.
        return self.costs.learn(rows, load.context, load.num_sequences, outcome.verify_seconds)

    def _book(self, load: Load) -> "_Book":
        return self._books[load.num_sequences.bit_length()]

    def _judge(self, book: "_Book", outcome: StepOutcome) -> None:
        """Enter what drafting gained or cost in this step, in plain steps."""
        load, purse = outcome.load, self._purses.of(outcome.load.num_sequences)
        book.count(outcome.num_nodes, reads=load.num_rows > load.num_drafting)
        plain = self.plain_seconds(load)
        if not outcome.drafted:
            book.note_plain(outcome.other_seconds)
            purse.rest()
            return
        rows = load.num_rows + np.array([0.0, outcome.num_nodes])
        predicted = self.costs.verify_seconds(rows, load.context, load.num_sequences)
        # What it took, whatever had been expected of so many rows; but nodes make no forward faster, only clocks do.
        verify = min(max(outcome.verify_seconds, float(predicted[0])), _LARGEST_SURPRISE * float(predicted[1]))
        drafting = self._drafts.learn(load.num_drafting, outcome.draft_seconds)
        spent = drafting + verify - float(predicted[0]) + book.note_drafted(outcome.other_seconds)
        gained = outcome.accepted_tokens / load.num_drafting * plain
        gain = (gained - spent) / plain - _UNSEEN
        book.note_gain(gain)
        # Where some still read their prompts, a step of those that draft is a part of what the purse is counted in.
        purse.settle(load.num_drafting / load.num_sequences * (gain - book.pay() / plain))


class _Book:
    """What is known of one size of batch."""

    def __init__(self) -> None:
        self.references_due = float(_FIRST_REFERENCES)
        self.plain_other_seconds = 0.0
        self.owed_seconds = 0.0  # taken by following texts since drafts were last tried
        self._steps_with_nodes = 0
        self._pause = _FIRST_PAUSE
        self._drafted_other_seconds = 0.0
        self._gain = 0.0
        self._gains_noted = 0

    def count(self, num_nodes: int, *, reads: bool) -> None:
        """One more step, with so many nodes, that reads prompts or not."""
        if not num_nodes:
            self.references_due = max(0.0, self.references_due - (_BESIDE_PROMPTS if reads else 1.0))
            return
        self._steps_with_nodes += 1
        if self._steps_with_nodes >= self._pause:
            clear = self._gain > _CLEAR
            self.references_due = 1.0 if clear else float(_REFERENCES)
            self._steps_with_nodes = 0
            self._pause = min(_LONGEST_CLEAR_PAUSE if clear else _LONGEST_PAUSE, 2 * self._pause)

    def pay(self) -> float:
        """What following the texts has taken until now."""
        owed, self.owed_seconds = self.owed_seconds, 0.0
        return owed

    def note_gain(self, gain: float) -> None:
        """A step with drafts gained so many plain ones."""
        self._gains_noted += 1
        self._gain += max(_RATE, 1 / self._gains_noted) * (gain - self._gain)

    def note_plain(self, seconds: float) -> None:
        self.plain_other_seconds = _moved(self.plain_other_seconds, seconds)

    def note_drafted(self, seconds: float) -> float:
        """Returns how much longer everything but drafting and verifying takes when there are drafts."""
        self._drafted_other_seconds = _moved(self._drafted_other_seconds, seconds)
        return max(0.0, self._drafted_other_seconds - self.plain_other_seconds) if self.plain_other_seconds else 0.0


def _moved(mean: float, value: float) -> float:
    return mean + _RATE * (value - mean) if mean else value
