"""Has the traffic changed? By the words of answers, which are known of every query, whatever drafts it and whether or
not it is recorded. Other weights say the same words."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from adaptation.vocabulary import TokenCounts

_SLACK = 0.5  # of an unusual score that is forgiven, in standard deviations (k)
_THRESHOLD = 8.0  # sum of unusual scores after which traffic counts as changed, in standard deviations (h)
_LEAST = 24  # queries before a score can be called unusual
_LEAST_SPREAD = 0.01
_FARTHEST = 3.0  # spreads; no single query, however odd, decides

_MOST_TOKENS = 512  # of an answer, its last ones
_RECENT = 512  # tokens said after which one is half forgotten
_MEMORY = 32  # queries; the same words surprise less and less, as they come to be known
_UNSEEN = 0.1  # what a token counts that nobody has said yet (Lidstone)
_PRIOR = 1024  # tokens that what is usual counts for what is recent (Dirichlet)


class RisingScores:
    """A cumulative sum (Page, 1954) over scores of queries, which may fall.

        z = (x - mean) / sd;   S <- max(0, S + z - k);   changed when S > h

    With k = 0.5 and h = 8 unchanged traffic is called changed once in some 20,000 queries, and a shift of one and a
    half standard deviations is noticed after about eight. What is usual is learnt anew after every change.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """The traffic has changed: what is usual is not known yet."""
        self._count = 0
        self._mean = self._variance = self._sum = 0.0

    def observe(self, score: float) -> bool:
        """Whether the traffic has changed. What is no number says nothing."""
        if not math.isfinite(score):
            return False
        if self._count >= _LEAST:
            unusual = (score - self._mean) / max(math.sqrt(self._variance), _LEAST_SPREAD)
            self._sum = max(0.0, self._sum + min(max(unusual, -_FARTHEST), _FARTHEST) - _SLACK)
        if self._sum > _THRESHOLD:
            self.reset()
            return True
        self._remember(score)
        return False

    def _remember(self, score: float) -> None:
        self._count += 1
        rate = 1.0 / min(self._count, _MEMORY)
        distance = score - self._mean
        self._mean += rate * distance
        self._variance = (1.0 - rate) * (self._variance + rate * distance * distance)


class TrafficMonitor:
    """An answer's scores, in nats per token: how surprising it is by what was said of late, and how much less so by
    what was said just now. Other words are either new or, where every kind of word was said before, now said again
    and again."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._usual = TokenCounts(vocab)
        self._recent = TokenCounts(vocab, half_life=_RECENT)
        self._is_new, self._is_alike = RisingScores(), RisingScores()

    def observe(self, answer: Sequence[int]) -> bool:
        """Whether answers of late are newer, or more like one another, than those before."""
        said = answer[-_MOST_TOKENS:]
        if not said:
            return False
        surprise, likeness = self._scores(torch.tensor(said))
        for counts in (self._usual, self._recent):
            counts.observe(said)
        is_new, is_alike = self._is_new.observe(surprise), self._is_alike.observe(likeness)
        if is_new or is_alike:
            self._is_new.reset()
            self._is_alike.reset()
        return is_new or is_alike

    def _scores(self, said: Tensor) -> tuple[float, float]:
        usual = (self._usual.of(said) + _UNSEEN) / (self._usual.total + _UNSEEN * self._vocab)
        recent = (self._recent.of(said) + _PRIOR * usual) / (self._recent.total + _PRIOR)
        return -float(usual.log().mean()), float((recent / usual).log().mean())
