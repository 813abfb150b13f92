"""What is learnt from a finished query and what is validated on: training samples, their buffers, the validation set.

    s = sum over rejected positions of (1 - r),   r = the drafter's probability of the target's token   (section 3.4)

Steps that no block drafted for count as much as its blocks have missed of late: where drafting does not pay nobody
drafts, and yet a drafter that had learnt these texts might pay.
"""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from adaptation.policy import ARMS, Arm
from drafters.feedback import DraftLabels, QueryFeedback
from drafters.protocol import Noise
from drafters.training.corpus import Example

_ACCEPTED_PER_REJECTED = 3  # the rank head must see both, or it learns that everything is rejected
_LEAST_PROMPT = 2  # positions; a first label needs a position with features and a token before it
_LEAST_ANSWER = 4  # labelled tokens; less says nothing about a drafter
_MISSED_MEMORY = 512  # rejected positions over which it is known what blocks miss
_MAX_POSITIONS = 4096  # rejected ones that wait for updates, in all
_HURRIED_SHARE = 0.5  # of queries that are held for validation after a change of traffic


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """What one query teaches."""

    signal: float  # s of the draft labels that were kept, and of steps that no block drafted for
    num_rejected: int
    draft_labels: DraftLabels
    example: Example | None  # None: too little text for a full update
    noise: Noise  # each label's token is the first behind its root


class UndraftedSignal:
    """Estimates what the steps that no block drafted for would have taught."""

    def __init__(self) -> None:
        self._missed = 1.0  # of a rejected position, 1 - r; all of it while nothing is known
        self._num_observed = 1

    def observe(self, sample: TrainingSample) -> None:
        """What blocks missed where they did draft."""
        self._num_observed = min(_MISSED_MEMORY, self._num_observed + sample.num_rejected)
        self._missed += (sample.signal - sample.num_rejected * self._missed) / self._num_observed

    def signal(self, steps: int) -> float:
        return steps * self._missed


def undrafted_steps(feedback: QueryFeedback) -> int:
    """Every step chose one token that was not drafted: how many of these were not labelled as rejected."""
    return max(0, feedback.query.num_steps - feedback.draft_labels.num_rejected)


def training_sample(feedback: QueryFeedback, *, most_rejected: int) -> TrainingSample:
    """The newest rejected positions of a query, at most `most_rejected`, with accepted ones from among them."""
    labels, query = _newest(feedback.draft_labels, most_rejected), feedback.query
    signal = float((1.0 - labels.chances[labels.rejected].double()).sum())
    noise = Noise.of_text(query.seed, query.temperature, query.offset + labels.positions - 1)
    return TrainingSample(signal, labels.num_rejected, labels, example_of(feedback), noise)


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
        seed=feedback.query.seed,
        start=feedback.query.offset + feedback.first,
    )


def _newest(labels: DraftLabels, most_rejected: int) -> DraftLabels:
    later_rejected = labels.rejected.flip(0).cumsum(0).flip(0)
    later_accepted = (~labels.rejected).flip(0).cumsum(0).flip(0)
    most_accepted = _ACCEPTED_PER_REJECTED * most_rejected
    return labels.take(torch.where(labels.rejected, later_rejected <= most_rejected, later_accepted <= most_accepted))


class SampleBuffers:
    """One queue of samples per arm, bounded by the rejected positions in all of them and by the samples of each: the
    oldest make room and are counted.

    Full updates see some of the latest samples again (replay buffer), whatever those were for: what a few texts teach
    fits only them.
    """

    def __init__(
        self,
        max_samples: Mapping[Arm, int],
        *,
        replay_texts: int,
        update_samples: int,
        rng: random.Random,
        max_positions: int = _MAX_POSITIONS,
    ) -> None:
        """`update_samples`: as many as a full update has time for, so that `rng` draws from the replay buffer what new
        ones leave room for."""
        self.num_dropped = self.num_remembered = 0
        self._max_samples = max_samples
        self._max_positions = max_positions
        self._waiting: deque[tuple[Arm, TrainingSample]] = deque()
        self._taken: list[tuple[Arm, TrainingSample]] = []
        self._replay: deque[TrainingSample] = deque(maxlen=replay_texts)
        self._update_samples = update_samples
        self._rng = rng

    @property
    def positions(self) -> int:
        return sum(sample.num_rejected for _, sample in self._waiting)

    @property
    def signals(self) -> dict[Arm, list[float]]:
        """Of the samples that wait, by arm, oldest first."""
        return {arm: [sample.signal for name, sample in self._waiting if name == arm] for arm in ARMS}

    @property
    def counts(self) -> dict[Arm, int]:
        return {arm: len(signals) for arm, signals in self.signals.items()}

    def remember(self, sample: TrainingSample) -> None:
        """Let full updates see it again."""
        self.num_remembered += 1
        self._replay.append(sample)

    def add(self, arm: Arm, sample: TrainingSample) -> None:
        """A head update needs no text, so none is kept for it."""
        self._waiting.append((arm, replace(sample, example=None) if arm == "head" else sample))
        if self.counts[arm] > self._max_samples[arm]:
            self._drop(next(place for place, (name, _) in enumerate(self._waiting) if name == arm))
        while self.positions > self._max_positions:
            self._drop(0)

    def take(self, arm: Arm) -> list[TrainingSample]:
        """All samples that wait for this arm, oldest first, after those that are replayed; they wait no longer."""
        self._taken = [entry for entry in self._waiting if entry[0] == arm]
        self._waiting = deque(entry for entry in self._waiting if entry[0] != arm)
        taken = [sample for _, sample in self._taken]
        return taken if arm == "head" else self.rehearsal(beside=taken) + taken

    def put_back(self) -> None:
        """Let the samples of the last `take` wait again, as the oldest: their update was interrupted."""
        self._waiting.extendleft(reversed(self._taken))
        self._taken = []

    def rehearsal(self, *, beside: Sequence[TrainingSample] = ()) -> list[TrainingSample]:
        """Of those that may be seen again, as many as an update has room for beside others."""
        known = [sample for sample in self._replay if not any(sample is new for new in beside)]
        room = max(0, self._update_samples - len(beside))
        return self._rng.sample(known, min(room, len(known)))

    def _drop(self, place: int) -> None:
        del self._waiting[place]
        self.num_dropped += 1

    def clear_replay(self) -> None:
        """It says nothing of today's texts, or has broken an update."""
        self._replay.clear()

    def clear(self) -> None:
        """The drafter these samples are about, and that they may have made, is no longer served."""
        self._waiting.clear()
        self._replay.clear()


@dataclass(frozen=True, slots=True)
class ValidationText:
    """A text that may be replayed, and the number by which its scores are known."""

    number: int
    example: Example


class ValidationSet:
    """The most recent texts of a random share of queries, never learnt from.

    When the traffic has changed, only texts from then on can say what is better for it: until there are `enough` of
    them, every second query is held for validation.
    """

    def __init__(self, *, share: float, enough: int, max_texts: int, rng: random.Random) -> None:
        self._share = share
        self._enough = enough
        self._rng = rng
        self._number = 0
        self._texts: deque[ValidationText] = deque(maxlen=max_texts)
        self._first_current = 0  # number of the first text of today's traffic
        self._hurries = False

    @property
    def texts(self) -> Sequence[ValidationText]:
        return tuple(self._texts)

    @property
    def current(self) -> Sequence[ValidationText]:
        """Those of the traffic as it is now."""
        return tuple(text for text in self._texts if text.number >= self._first_current)

    @property
    def suffices(self) -> bool:
        """Whether an update could be validated now."""
        return len(self.current) >= self._enough

    def traffic_changed(self) -> None:
        self._first_current = self._number + 1
        self._hurries = True

    def draws(self) -> bool:
        """Whether the next query is held for validation."""
        self._hurries = self._hurries and not self.suffices
        return self._rng.random() < (max(self._share, _HURRIED_SHARE) if self._hurries else self._share)

    def number(self, example: Example) -> ValidationText:
        """A text under a number of its own, kept or not."""
        self._number += 1
        return ValidationText(self._number, example)

    def keep(self, text: ValidationText) -> None:
        self._texts.append(text)
