"""What becomes of a finished query: a lesson in an arm's buffer, a text that judges, or neither.

Whatever may not be learnt from is neither kept nor scored. Knows no weights.
"""

from collections import Counter
from dataclasses import dataclass, replace

from adaptation.buffers import HeldBack, HeldBackText, LessonBuffers
from adaptation.policy import Decision, Policy, QueryReport
from adaptation.quota import Admission, Quota
from adaptation.signal import Lesson, Unspoken, lesson_of, unspoken_steps
from drafters.feedback import QueryFeedback

_RESTING = Admission(0, "resting")
_MANY_WITHOUT_TEXT = 64  # queries


@dataclass(frozen=True, slots=True)
class Taken:
    """What was decided about one query."""

    admission: Admission
    decision: Decision
    text: HeldBackText | None  # its text, where it may be scored
    held_back: bool


class Intake:
    """Asks quota and policy, and fills the buffers."""

    def __init__(
        self, policy: Policy, quota: Quota, buffers: LessonBuffers, held_back: HeldBack, *, query_positions: int
    ) -> None:
        self.decisions: Counter[str] = Counter()  # by choice and reason, "head:gain"
        self.refusals: Counter[str] = Counter()  # by reason of the quota
        self._policy = policy
        self._quota = quota
        self._buffers = buffers
        self._held_back = held_back
        self._query_positions = query_positions
        self._unspoken = Unspoken()
        self._num_without_text = 0

    @property
    def hears_no_text(self) -> bool:
        """Whether of many queries in a row none had a text that may be scored, so that no update could be judged."""
        return self._num_without_text >= _MANY_WITHOUT_TEXT

    def take(self, feedback: QueryFeedback, *, training_cost: float, learning: bool) -> Taken:
        """Hear of one query; with `learning` off it only counts."""
        query = feedback.query
        unspoken = unspoken_steps(feedback)
        positions = feedback.marks.num_rejected + unspoken
        asked = feedback.recorded or not query.store
        admission = self._quota.admit(query.client, positions, store=query.store) if asked else _RESTING
        lesson = self._lesson(feedback, admission, unspoken)
        held_back = admission.admitted and lesson.example is not None and self._held_back.draws()
        learns = admission.admitted and learning and not held_back
        decision = self._policy.decide(_report(feedback, training_cost, lesson.signal if learns else None))
        if learns and lesson.example is not None:
            self._buffers.remember(lesson)
        if decision.arm is not None:
            self._buffers.add(decision.arm, lesson)
        text = None
        if admission.admitted and lesson.example is not None:
            text = self._held_back.number(lesson.example)
        if held_back and text is not None:
            self._held_back.keep(text)
        if asked:
            self._num_without_text = self._num_without_text + 1 if text is None else 0
        self._count(admission, decision)
        return Taken(admission, decision, text, held_back)

    def _lesson(self, feedback: QueryFeedback, admission: Admission, unspoken: int) -> Lesson:
        """Of the positions it may teach: rejected ones first, then steps that no block spoke of."""
        most = min(max(1, admission.positions), self._query_positions)
        lesson = lesson_of(feedback, most_rejected=most)
        if not admission.admitted or lesson.example is None:
            return lesson
        self._unspoken.hear(lesson)
        missed = self._unspoken.signal(min(unspoken, most - lesson.num_rejected))
        return replace(lesson, signal=lesson.signal + missed)

    def _count(self, admission: Admission, decision: Decision) -> None:
        self.decisions[f"{decision.choice}:{decision.reason}"] += 1
        if not admission.admitted:
            self.refusals[admission.reason] += 1


def _report(feedback: QueryFeedback, training_cost: float, signal: float | None) -> QueryReport:
    return QueryReport(
        emitted_tokens=feedback.emitted_tokens,
        draft_cost=feedback.query.draft_cost,
        verify_cost=feedback.query.verify_cost,
        training_cost=training_cost,
        signal=signal,
    )
