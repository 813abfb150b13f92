"""Has the traffic changed? By how likely the drafter held the target's tokens, by how well the drafter as deployed
would do on the texts, and by the words of the answers."""

import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from adaptation.evaluator import OfflineEvaluator
from adaptation.samples import ValidationText
from adaptation.vocabulary import TokenCounts
from drafters.feedback import Query, QueryFeedback

_SLACK = 0.5  # of an unusual score that is forgiven, in standard deviations (k)
_THRESHOLD = 8.0  # sum of unusual scores after which traffic counts as changed, in standard deviations (h)
_MEMORY = 128  # queries
_LEAST = 24  # queries before a score can be called unusual
_LEAST_SPREAD = 0.01
_FARTHEST = 3.0  # spreads; no single query, however odd, decides
_LEAST_VALUES = 16  # of a score; queries of which little was drafted count together

_MOST_TOKENS = 512  # of an answer, its last ones
_RECENT = 512  # tokens said after which one is half forgotten
_TOKEN_MEMORY = 32  # queries; the same words surprise less and less, as they come to be known
_UNSEEN = 0.1  # what a token counts that nobody has said yet (Lidstone)
_PRIOR = 1024  # tokens that what is usual counts for what is recent (Dirichlet)

_REPLAY_SHARE = 0.02  # of the time, for texts that are replayed for this alone

Change = Literal["other_words", "other_traffic"]


class ChangeDetector:
    """A two-sided cumulative sum (Page, 1954) over scores of queries.

        z = (x - mean) / sd;   U <- max(0, U + z - k),   D <- max(0, D - z - k);   changed when U or D > h

    With k = 0.5 and h = 8 unchanged traffic is called changed once in some 10,000 queries, and a shift of one and a
    half standard deviations is noticed after about eight. What is usual is learnt anew after every change.
    """

    def __init__(self, *, memory: int = _MEMORY, only_rising: bool = False) -> None:
        """`memory`: queries over which mean and spread forget; `only_rising`: falling scores are usual soon."""
        self._memory = memory
        self._only_rising = only_rising
        self.reset()

    def reset(self) -> None:
        """The traffic has changed: what is usual is not known yet."""
        self._count = 0
        self._mean = self._variance = self._up = self._down = 0.0
        self._waiting: list[float] = []

    def observe_values(self, values: Sequence[float]) -> bool:
        """What is known of one query, whose mean is its score; whether the traffic has changed."""
        self._waiting += values
        if len(self._waiting) < _LEAST_VALUES:
            return False
        score, self._waiting = fmean(self._waiting), []
        return self.observe(score)

    def observe(self, score: float) -> bool:
        """Whether the traffic has changed. What is no number says nothing."""
        if not math.isfinite(score):
            return False
        if self._count >= _LEAST:
            self._add(score)
        if max(self._up, self._down) > _THRESHOLD:
            self.reset()
            return True
        self._remember(score)
        return False

    def suspect(self) -> None:
        """Something else has changed: half the evidence is enough now, if it is known at all what is usual."""
        if self._count < _LEAST:
            return
        self._up = max(self._up, _THRESHOLD / 2)
        self._down = max(self._down, _THRESHOLD / 2)

    def weights_changed(self) -> None:
        """Scores come from other weights now: what is usual is soon learnt anew, and what was unusual is forgotten."""
        self._count = min(self._count, _LEAST)
        self._up = self._down = 0.0
        self._waiting = []

    def _add(self, score: float) -> None:
        unusual = (score - self._mean) / max(math.sqrt(self._variance), _LEAST_SPREAD)
        step = min(max(unusual, -_FARTHEST), _FARTHEST)
        self._up = max(0.0, self._up + step - _SLACK)
        self._down = 0.0 if self._only_rising else max(0.0, self._down - step - _SLACK)

    def _remember(self, score: float) -> None:
        self._count += 1
        rate = 1.0 / min(self._count, self._memory)
        distance = score - self._mean
        self._mean += rate * distance
        self._variance = (1.0 - rate) * (self._variance + rate * distance * distance)


class TokenChange:
    """By the words of answers: known of every query, recorded or not, drafted for or not.

    An answer's scores, in nats per token: how surprising it is by what was said of late, and how much less so by what
    was said just now. Other words are either new or, where every kind of word was said before, now said again and
    again. Other weights say the same words, so that nothing is forgotten at a publish.
    """

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._usual = TokenCounts(vocab)
        self._recent = TokenCounts(vocab, half_life=_RECENT)
        self._is_new, self._is_alike = (ChangeDetector(memory=_TOKEN_MEMORY, only_rising=True) for _ in range(2))

    def observe(self, query: Query) -> bool:
        """Whether answers of late are newer, or more like one another, than those before."""
        said = query.answer[-_MOST_TOKENS:]
        if not said:
            return False
        surprise, likeness = self._scores(torch.tensor(said))
        for counts in (self._usual, self._recent):
            counts.observe(said)
        is_new, is_alike = self._is_new.observe(surprise), self._is_alike.observe(likeness)
        return is_new or is_alike

    def reset(self) -> None:
        for change in (self._is_new, self._is_alike):
            change.reset()

    def _scores(self, said: Tensor) -> tuple[float, float]:
        usual = (self._usual.of(said) + _UNSEEN) / (self._usual.total + _UNSEEN * self._vocab)
        recent = (self._recent.of(said) + _PRIOR * usual) / (self._recent.total + _PRIOR)
        return -float(usual.log().mean()), float((recent / usual).log().mean())


class AnchorScoreChange:
    """By replays of the drafter as deployed: where drafting does not pay hardly anything else is known of a text.

    Validation texts are replayed anyway, the others as long as that takes no more than a small share of the time.
    """

    def __init__(self, evaluator: OfflineEvaluator, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.change = ChangeDetector()
        self._evaluator = evaluator
        self._clock = clock
        self._quiet_until = -math.inf

    def observe(self, text: ValidationText, *, validates: bool) -> bool:
        if validates:
            return self.change.observe(self._evaluator.anchor([text])[0])
        began = self._clock()
        if began < self._quiet_until:
            return False
        score = self._evaluator.anchor_once(text)
        now = self._clock()
        self._quiet_until = now + (now - began) / _REPLAY_SHARE
        return self.change.observe(score)


class TrafficMonitor:
    """All three together."""

    def __init__(self, vocab: int, evaluator: OfflineEvaluator) -> None:
        self._drafted = ChangeDetector()
        self._anchor = AnchorScoreChange(evaluator)
        self._tokens = TokenChange(vocab)

    def observe(
        self, feedback: QueryFeedback, text: ValidationText | None, *, admitted: bool, validates: bool
    ) -> Change | None:
        """One finished query; in what the traffic has changed, if it has. `text`: its text, where it may be scored."""
        if feedback.query.store and self._tokens.observe(feedback.query):
            return "other_words"
        if not admitted:
            return None
        scores_otherwise = text is not None and self._anchor.observe(text, validates=validates)
        drafts_otherwise = self._drafted.observe_values(feedback.draft_labels.chances.tolist())
        return "other_traffic" if drafts_otherwise or scores_otherwise else None

    def suspect(self) -> None:
        """Something else has changed."""
        self._drafted.suspect()
        self._anchor.change.suspect()

    def weights_changed(self) -> None:
        self._drafted.weights_changed()

    def reset(self) -> None:
        """The traffic has changed, as others know: what is usual is not known yet."""
        for usual in (self._drafted, self._anchor.change, self._tokens):
            usual.reset()
