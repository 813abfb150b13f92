"""Monitors of what serves: alarms when learnt weights are worse than those they came from, and detection of changed
traffic.

Alarms compare scores (tokens per verify) of two drafters on the same texts: the serving one with the anchor, and for a
while with the weights it replaced. Pairs cancel the traffic; a fall of the served score alone (SpecBlock section 3.4)
is as often other traffic. Traffic is judged by the tokens of answers, which are known for every query, drafted or not,
recorded or not, and do not depend on the drafter's weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, TypeAdapter
from torch import Tensor

from adaptation.config import Tuning
from adaptation.policy import State
from adaptation.records import AlarmReason

_SLACK = 0.5  # fall per group that is forgiven, in standard errors (k)
_THRESHOLD = 7.0  # sum of falls that raises the alarm, in standard errors (h)
_FORGET = 0.9  # weight of the past in the spread of the pairs, per window
_GROUP = 4  # pairs
_PROBATION = 4  # windows of pairs during which weights count as new
_LEAST_SPREAD = 0.01  # tokens per verify; a smaller spread comes from replays of equal drafters


_RISE_SLACK = 0.5  # of an unusual score that is forgiven, in standard deviations (k)
_RISE_THRESHOLD = 8.0  # sum of unusual scores after which traffic counts as changed, in standard deviations (h)
_MIN_QUERIES = 24  # queries before a score can be called unusual
_MIN_SCORE_SPREAD = 0.01
_FARTHEST = 3.0  # clipped deviation: no single query decides

_MOST_TOKENS = 512  # last tokens of an answer that are scored
_RECENT = 512  # half-life of the recent counts, in tokens
_MEMORY = 32  # queries in the running mean: tokens surprise less as their counts grow
_UNSEEN = 0.1  # added to every count (Lidstone smoothing)
_PRIOR = 1024  # weight of the long-term counts in the recent ones, in tokens (Dirichlet)

_HALF_LIFE = 65_536  # tokens
_MAX_PER_QUERY = 4  # times that one query may count for a token: no single text decides
_MIN_STORED = 0.5  # smaller counts are not stored


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why the serving weights are not trusted any more: `statistic` exceeded `limit`, or a score was not finite."""

    reason: AlarmReason
    statistic: float
    limit: float


class _CusumState(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    total: NonNegativeFloat = 0.0
    squares: NonNegativeFloat = 0.0
    freedom: NonNegativeFloat = 0.0


class PairedCusum:
    """Cumulative sum of how far the serving drafter falls below the anchor on the same sequences.

        S <- max(0, S - mean(d) / (sd(d) / sqrt(n)) - k),   d = serving - anchor;   alarm when S > h

    One step per group of four pairs, in standard errors of its mean. With k = 0.5 equal drafters raise a false alarm
    once in some 2,600 groups at h = 6 (single pairs: four times as often) and once in some 7,000 at h = 7, where a
    drafter that is worse by one standard deviation of a pair is caught within 20 pairs.
    """

    def __init__(self, *, least_pairs: int, threshold: float = _THRESHOLD) -> None:
        assert least_pairs >= 2, "one pair has no spread"
        self._least_pairs = least_pairs
        self._threshold = threshold
        self._now = _CusumState()

    def observe(self, serving: Sequence[float], anchor: Sequence[float]) -> Alarm | None:
        """Add one window: scores of both drafters, text by text. # -> an alarm, if any"""
        assert len(serving) == len(anchor), "scores do not come in pairs"
        if not all(map(math.isfinite, serving)):
            return Alarm("not_finite", self._now.total, self._threshold)
        differences = [ours - theirs for ours, theirs in zip(serving, anchor, strict=True)]
        if len(differences) < self._least_pairs or not all(map(math.isfinite, differences)):
            return None
        highest = self._add(differences)
        return Alarm("worse_than_anchor", highest, self._threshold) if highest > self._threshold else None

    def reset(self) -> None:
        """Set the sum to 0: another drafter serves now. The spread of pairs is the traffic's, and stays."""
        self._now = self._now.model_copy(update={"total": 0.0})

    def state(self) -> State:
        """The sum and the spread as plain values."""
        return self._now.model_dump(mode="json")

    def restore(self, state: State) -> None:
        """Load what `state` returned. Raises ValueError for anything else, and then changes nothing."""
        self._now = _CusumState.model_validate(state)

    def _add(self, differences: Sequence[float]) -> float:
        """The highest the sum came to in this window."""
        freedom = _FORGET * self._now.freedom + len(differences) - 1
        squares = _FORGET * self._now.squares + variance(differences) * (len(differences) - 1)
        spread = max(math.sqrt(squares / freedom), _LEAST_SPREAD)
        total = highest = self._now.total
        for start in range(0, len(differences), _GROUP):
            group = differences[start : start + _GROUP]
            fall = -fmean(group) / (spread / math.sqrt(len(group)))
            total = max(0.0, total + fall - _SLACK)
            highest = max(highest, total)
        self._now = _CusumState(total=total, squares=squares, freedom=freedom)
        return highest


@dataclass(frozen=True, slots=True)
class TextScores:
    """Scores of one text, in tokens per verify."""

    serving: float
    anchor: float
    before: float | None  # of the weights that the serving ones replaced; None: not compared any more


class RollbackMonitor:
    """Both alarms, and the scores that do not fill a window yet.

    Besides the anchor, new weights are for a while compared with those they replaced: a drafter that has learnt a lot
    can lose all of it and still be no worse than the anchor.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._num_pairs = tuning.alarm_texts
        self.alarms = {name: PairedCusum(least_pairs=self._num_pairs) for name in ("cusum", "cusum_before")}
        self._pairs: list[TextScores] = []
        self._probation = 0

    @property
    def on_probation(self) -> bool:
        """Whether the serving weights are new."""
        return self._probation > 0

    def take_probation(self) -> bool:
        """Count down the probation of new weights. # -> whether to score this text even if it is not for validation"""
        on_probation = self.on_probation
        self._probation -= on_probation
        return on_probation

    def observe(self, pair: TextScores) -> Alarm | None:
        """Add the scores of one text. # -> an alarm, if any"""
        self._pairs.append(pair)
        if len(self._pairs) < self._num_pairs:
            return None
        window, self._pairs = self._pairs, []
        alarm = self.alarms["cusum"].observe([one.serving for one in window], [one.anchor for one in window])
        return alarm or self._compare_with_before(window)

    def _compare_with_before(self, window: Sequence[TextScores]) -> Alarm | None:
        known = [(one.serving, one.before) for one in window if one.before is not None]
        alarm = self.alarms["cusum_before"].observe([ours for ours, _ in known], [theirs for _, theirs in known])
        return None if alarm is None else replace(alarm, reason="worse_than_before")

    def weights_changed(self) -> None:
        """Start over, with a probation: other weights serve now."""
        for alarm in self.alarms.values():
            alarm.reset()
        self._pairs = []
        self._probation = _PROBATION * self._num_pairs


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
    """Detects that scores of queries rise, by a cumulative sum (Page, 1954). They may fall.

        z = (x - mean) / sd;   S <- max(0, S + z - k);   changed when S > h

    With k = 0.5 and h = 8 unchanged traffic is called changed once in some 20,000 queries, and a shift of one and a
    half standard deviations is noticed after about eight. Mean and deviation are estimated anew after every change.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Estimate mean and deviation anew."""
        self._count = 0
        self._mean = self._variance = self._sum = 0.0

    def observe(self, score: float) -> bool:
        """Add a finite score. # -> whether the traffic has changed"""
        if self._count >= _MIN_QUERIES:
            unusual = (score - self._mean) / max(math.sqrt(self._variance), _MIN_SCORE_SPREAD)
            self._sum = max(0.0, self._sum + min(max(unusual, -_FARTHEST), _FARTHEST) - _RISE_SLACK)
        if self._sum > _RISE_THRESHOLD:
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
    """Detects changed traffic from two scores of each answer, in nats per token: how surprising it is under the
    long-term token counts (new tokens), and how much less so under the recent ones (repeated tokens)."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._long_term = TokenCounts(vocab)
        self._recent = TokenCounts(vocab, half_life=_RECENT)
        self._is_new, self._is_alike = RisingScores(), RisingScores()

    def observe(self, answer: Sequence[int]) -> bool:
        """Add an answer. # -> whether recent answers are newer, or more alike, than those before"""
        tokens = answer[-_MOST_TOKENS:]
        if not tokens:
            return False
        surprise, likeness = self._scores(torch.tensor(tokens))
        for counts in (self._long_term, self._recent):
            counts.observe(tokens)
        is_new, is_alike = self._is_new.observe(surprise), self._is_alike.observe(likeness)
        if is_new or is_alike:
            self._is_new.reset()
            self._is_alike.reset()
        return is_new or is_alike

    def _scores(self, tokens: Tensor) -> tuple[float, float]:
        long_term = (self._long_term.of(tokens) + _UNSEEN) / (self._long_term.total + _UNSEEN * self._vocab)
        recent = (self._recent.of(tokens) + _PRIOR * long_term) / (self._recent.total + _PRIOR)
        return -float(long_term.log().mean()), float((recent / long_term).log().mean())
