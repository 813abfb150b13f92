"""Has the traffic changed, by the words of its answers? Known of every query, recorded or not, drafted for or not.

Other words are either new or, where every kind of word was said before, now said again and again: code among talk, talk
among code. Other weights say the same words, so that nothing is forgotten at a publish. Knows no drafter.
"""

import torch
from torch import Tensor

from adaptation.change import TrafficChange
from adaptation.vocabulary import TokenCounts
from drafters.feedback import Query

_MOST_TOKENS = 512  # of an answer, its last ones
_RECENT = 512  # tokens said after which one is half forgotten
_MEMORY = 32  # queries; the same words surprise less and less, as they come to be known
_UNSEEN = 0.1  # what a token counts that nobody has said yet (Lidstone)
_PRIOR = 1024  # tokens that what is usual counts for what is recent (Dirichlet)


class OtherWords:
    """An answer's scores, in nats per token: how surprising it is by what was said of late, and how much less so by
    what was said just now."""

    def __init__(self, vocab: int, *, slack: float, threshold: float) -> None:
        self._vocab = vocab
        self._usual = TokenCounts(vocab)
        self._recent = TokenCounts(vocab, half_life=_RECENT)
        self._is_new, self._is_alike = (
            TrafficChange(slack=slack, threshold=threshold, memory=_MEMORY, only_rising=True) for _ in range(2)
        )

    def hear(self, query: Query) -> bool:
        """Whether answers of late are newer, or more like one another, than those before."""
        said = query.answer[-_MOST_TOKENS:]
        if not said:
            return False
        surprise, likeness = self._scores(torch.tensor(said))
        for counts in (self._usual, self._recent):
            counts.hear(said)
        is_new, is_alike = self._is_new.observe(surprise), self._is_alike.observe(likeness)
        return is_new or is_alike

    def start_anew(self) -> None:
        """The traffic has changed: what is usual is not known yet."""
        for change in (self._is_new, self._is_alike):
            change.start_anew()

    def _scores(self, said: Tensor) -> tuple[float, float]:
        usual = (self._usual.of(said) + _UNSEEN) / (self._usual.total + _UNSEEN * self._vocab)
        recent = (self._recent.of(said) + _PRIOR * usual) / (self._recent.total + _PRIOR)
        return -float(usual.log().mean()), float((recent / usual).log().mean())
