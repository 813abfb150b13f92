"""From a finished query to what is learnt from it: how much it could teach, and the sample itself, clipped.

    s = sum over rejected positions of (1 - r),   r = the drafter's probability of the target's token   (section 3.4)

Steps that no block spoke of count as much as its blocks have missed of late: where drafting does not pay nobody drafts,
and yet a drafter that had learnt these texts might pay.

Knows neither whether a query may be learnt from nor what is done with a sample.

Where samples wait for an update, and texts that are never learnt from wait to judge one.

Both are bounded: the oldest make room and are counted. Knows neither policy nor drafter."""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from adaptation.policy import ARMS, Arm
from drafters.feedback import DraftLabels, QueryFeedback
from drafters.training.corpus import Example

_ACCEPTED_PER_REJECTED = 3  # the rank head must see both, or it learns that everything is rejected
_LEAST_PROMPT = 2  # positions; a first label needs a position with features and a token before it
_LEAST_ANSWER = 4  # labelled tokens; less says nothing about a drafter
_MEMORY = 512  # rejected positions over which it is known what blocks miss


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """What one query teaches."""

    version: int  # the drafter that its draft labels are about
    signal: float  # s of the draft labels that were kept, and of steps that no block spoke of
    num_rejected: int
    draft_labels: DraftLabels
    example: Example | None  # None: too little text for a full update


class UndraftedSignal:
    """What the steps that no block spoke of would have taught."""

    def __init__(self) -> None:
        self._missed = 1.0  # of a rejected position, 1 - r; all of it while nothing is known
        self._heard = 1

    def observe(self, sample: TrainingSample) -> None:
        """What blocks missed where they did speak."""
        self._heard = min(_MEMORY, self._heard + sample.num_rejected)
        self._missed += (sample.signal - sample.num_rejected * self._missed) / self._heard

    def signal(self, steps: int) -> float:
        return steps * self._missed


def undrafted_steps(feedback: QueryFeedback) -> int:
    """Every step chose one token that was not drafted: how many of these were not marked as rejected."""
    return max(0, feedback.query.num_steps - feedback.draft_labels.num_rejected)


def training_sample(feedback: QueryFeedback, *, most_rejected: int) -> TrainingSample:
    """The newest rejected positions of a query, so many at most, with accepted ones from among them."""
    draft_labels = _newest(feedback.draft_labels, most_rejected)
    signal, num_rejected = signal_of(draft_labels), draft_labels.num_rejected
    return TrainingSample(feedback.query.version, signal, num_rejected, draft_labels, example_of(feedback))


def signal_of(draft_labels: DraftLabels) -> float:
    return float((1.0 - draft_labels.chances[draft_labels.rejected].double()).sum())


def example_of(feedback: QueryFeedback) -> Example | None:
    """The text as full updates and replays read it: it begins where its features do."""
    tokens = torch.tensor(feedback.query.tokens[feedback.first :])
    prompt = max(feedback.prompt - feedback.first, _LEAST_PROMPT)
    unlabelled = prompt + feedback.first - feedback.prompt
    if tokens.shape[0] - prompt < _LEAST_ANSWER:
        return None
    last = feedback.features.new_zeros(1, feedback.features.shape[1])
    return Example(
        tokens=tokens,
        features=torch.cat([feedback.features, last]),
        prompt=prompt,
        top_ids=feedback.top_ids[unlabelled:],
        top_logprobs=feedback.top_logprobs[unlabelled:],
        temperature=feedback.query.temperature,
    )


def _newest(draft_labels: DraftLabels, most_rejected: int) -> DraftLabels:
    later_rejected = draft_labels.rejected.flip(0).cumsum(0).flip(0)
    later_accepted = (~draft_labels.rejected).flip(0).cumsum(0).flip(0)
    kept = torch.where(
        draft_labels.rejected, later_rejected <= most_rejected, later_accepted <= _ACCEPTED_PER_REJECTED * most_rejected
    )
    return draft_labels.take(kept)


_HURRIED_SHARE = 0.5


class SampleBuffers:
    """One queue of samples per arm, bounded by the rejected positions in all of them and by the samples of each.

    Full updates hear some of the latest samples again, whatever those were for: what a few texts teach fits only them.
    """

    def __init__(
        self,
        *,
        most_positions: int,
        most_samples: Mapping[Arm, int],
        replayed: int,
        update_samples: int,
        rng: random.Random,
    ) -> None:
        """`replayed`: latest samples that are kept to be heard again; `update_samples`: as many as a full update has
        time for, so that `rng` draws from them what new ones leave room for."""
        self.num_dropped = 0  # samples
        self._most_samples = most_samples
        self._most_positions = most_positions
        self._waiting: deque[tuple[Arm, TrainingSample]] = deque()
        self._replay: deque[TrainingSample] = deque(maxlen=replayed)
        self._update_samples = update_samples
        self._rng = rng

    @property
    def positions(self) -> int:
        return sum(sample.num_rejected for _, sample in self._waiting)

    def count(self, arm: Arm) -> int:
        return sum(name == arm for name, _ in self._waiting)

    def remember(self, sample: TrainingSample) -> None:
        """Let full updates hear it again."""
        self._replay.append(sample)

    def add(self, arm: Arm, sample: TrainingSample) -> None:
        """A head update needs no text, so none is kept for it."""
        self._waiting.append((arm, replace(sample, example=None) if arm == "head" else sample))
        if self.count(arm) > self._most_samples[arm]:
            self._drop(next(place for place, (name, _) in enumerate(self._waiting) if name == arm))
        while self.positions > self._most_positions:
            self._drop(0)

    def take(self, arm: Arm) -> list[TrainingSample]:
        """All that waits for this arm, oldest first, behind what it hears again; it waits no longer."""
        taken = [sample for name, sample in self._waiting if name == arm]
        self._waiting = deque((name, sample) for name, sample in self._waiting if name != arm)
        if arm == "head":
            return taken
        others = [sample for sample in self._replay if not any(sample is new for new in taken)]
        room = max(0, self._update_samples - len(taken))
        return self._rng.sample(others, min(room, len(others))) + taken

    def _drop(self, place: int) -> None:
        del self._waiting[place]
        self.num_dropped += 1

    def forget_heard(self) -> None:
        """Let nothing be heard again: it says nothing of today's texts, or has broken an update."""
        self._replay.clear()

    def clear(self) -> None:
        """The drafter these samples are about, and that they may have made, is no longer served."""
        self._waiting.clear()
        self._replay.clear()

    def state(self) -> dict[Arm, int]:
        return {arm: self.count(arm) for arm in ARMS}


@dataclass(frozen=True, slots=True)
class ValidationText:
    """A text that may be replayed, and the number by which its scores are known."""

    number: int
    example: Example


class ValidationSet:
    """The most recent texts of a random share of queries.

    When the traffic has changed, only texts from then on can say what is better for it: until there are `enough` of
    them, every second query is held back.
    """

    def __init__(self, *, share: float, enough: int, most: int, rng: random.Random) -> None:
        self._share = share
        self._enough = enough
        self._rng = rng
        self._number = 0
        self._texts: deque[ValidationText] = deque(maxlen=most)
        self._first_alike = 0  # number of the first text of today's traffic
        self._hurries = False

    @property
    def texts(self) -> Sequence[ValidationText]:
        return tuple(self._texts)

    @property
    def alike(self) -> Sequence[ValidationText]:
        """Those of the traffic as it is now."""
        return tuple(text for text in self._texts if text.number >= self._first_alike)

    def traffic_changed(self) -> None:
        self._first_alike = self._number + 1
        self._hurries = True

    def draws(self) -> bool:
        """Whether the next query is held back."""
        self._hurries = self._hurries and len(self.alike) < self._enough
        return self._rng.random() < (max(self._share, _HURRIED_SHARE) if self._hurries else self._share)

    def number(self, example: Example) -> ValidationText:
        """A text under a number of its own, kept or not."""
        self._number += 1
        return ValidationText(self._number, example)

    def keep(self, text: ValidationText) -> None:
        self._texts.append(text)
