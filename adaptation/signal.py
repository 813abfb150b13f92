"""From a finished query to what is learnt from it: how much it could teach, and the lesson itself, clipped.

    s = sum over rejected positions of (1 - r),   r = the drafter's probability of the target's token   (section 3.4)

Steps that no block spoke of count as much as its blocks have missed of late: where drafting does not pay nobody drafts,
and yet a drafter that had learnt these texts might pay.

Knows neither whether a query may be learnt from nor what is done with a lesson.
"""

from dataclasses import dataclass

import torch

from drafters.feedback import Marks, QueryFeedback
from drafters.training.corpus import Example

_ACCEPTED_PER_REJECTED = 3  # the rank head must see both, or it learns that everything is rejected
_LEAST_PROMPT = 2  # positions; a first label needs a position with features and a token before it
_LEAST_ANSWER = 4  # labelled tokens; less says nothing about a drafter
_MEMORY = 512  # rejected positions over which it is known what blocks miss


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one query teaches."""

    version: int  # the drafter that its marks are about
    signal: float  # s of the marks that were kept, and of steps that no block spoke of
    num_rejected: int
    marks: Marks
    example: Example | None  # None: too little text for a full update


class Unspoken:
    """What the steps that no block spoke of would have taught."""

    def __init__(self) -> None:
        self._missed = 1.0  # of a rejected position, 1 - r; all of it while nothing is known
        self._heard = 1

    def hear(self, lesson: Lesson) -> None:
        """What blocks missed where they did speak."""
        self._heard = min(_MEMORY, self._heard + lesson.num_rejected)
        self._missed += (lesson.signal - lesson.num_rejected * self._missed) / self._heard

    def signal(self, steps: int) -> float:
        return steps * self._missed


def unspoken_steps(feedback: QueryFeedback) -> int:
    """Every step chose one token that was not drafted: how many of these were not marked as rejected."""
    return max(0, feedback.query.num_steps - feedback.marks.num_rejected)


def lesson_of(feedback: QueryFeedback, *, most_rejected: int) -> Lesson:
    """The newest rejected positions of a query, so many at most, with accepted ones from among them."""
    marks = _newest(feedback.marks, most_rejected)
    return Lesson(feedback.query.version, signal_of(marks), marks.num_rejected, marks, example_of(feedback))


def signal_of(marks: Marks) -> float:
    return float((1.0 - marks.chances[marks.rejected].double()).sum())


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


def _newest(marks: Marks, most_rejected: int) -> Marks:
    later_rejected = marks.rejected.flip(0).cumsum(0).flip(0)
    later_accepted = (~marks.rejected).flip(0).cumsum(0).flip(0)
    kept = torch.where(
        marks.rejected, later_rejected <= most_rejected, later_accepted <= _ACCEPTED_PER_REJECTED * most_rejected
    )
    return marks.take(kept)
