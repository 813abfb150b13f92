"""Detects changes of traffic from the tokens of answers, which are known for every query, drafted or not, recorded or
not, and do not depend on the drafter's weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, TypeAdapter
from torch import Tensor

from adaptation.policy import State

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

_HALF_LIFE = 65_536  # tokens
_MAX_PER_QUERY = 4  # times that one query may count for a token: no single text decides
_MIN_STORED = 0.5  # smaller counts are not stored


@dataclass
class _StoredCounts:
    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    tokens: list[NonNegativeInt]
    counts: list[NonNegativeFloat]


_STORED_COUNTS = TypeAdapter(_StoredCounts)


class TokenCounts:
    """How often each token of the target occurred in recent answers, with exponential decay."""

    def __init__(self, vocab: int, *, half_life: int = _HALF_LIFE) -> None:
        """`half_life`: tokens after which an occurrence counts half."""
        self._counts = torch.zeros(vocab)
        self._half_life = half_life

    @property
    def total(self) -> float:
        """Sum of all counts."""
        return float(self._counts.sum())

    def observe(self, tokens: Sequence[int]) -> None:
        """Add the tokens of one query."""
        ids, times = torch.tensor(tokens, dtype=torch.int64).unique(return_counts=True)
        self._counts *= 0.5 ** (len(tokens) / self._half_life)
        self._counts[ids] += times.clamp(max=_MAX_PER_QUERY)

    def of(self, tokens: Tensor) -> Tensor:
        """Counts of these tokens. # tokens [n] int64 -> [n]"""
        return self._counts[tokens.cpu()]

    def most_frequent(self, size: int) -> Tensor:
        """The most frequent tokens; among equals the lowest ids, which tokenizers give to frequent tokens.
        # -> [size] int64, ascending"""
        return self._counts.argsort(descending=True, stable=True)[:size].sort().values

    def state(self) -> State:
        """The counts as plain values."""
        kept = (self._counts >= _MIN_STORED).nonzero()[:, 0]
        return {"tokens": kept.tolist(), "counts": self._counts[kept].tolist()}

    def restore(self, state: State) -> None:
        """Load what `state` returned. Raises ValueError for anything else, and then changes nothing."""
        stored, counts = _STORED_COUNTS.validate_python(state), torch.zeros_like(self._counts)
        if len(stored.tokens) != len(stored.counts) or max(stored.tokens, default=0) >= counts.shape[0]:
            raise ValueError("counts of tokens that do not fit this target")
        counts[torch.tensor(stored.tokens, dtype=torch.int64)] = torch.tensor(stored.counts)
        self._counts = counts


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
