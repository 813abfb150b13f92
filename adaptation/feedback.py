"""Filters finished queries: each becomes a training sample, a validation text, or neither; and detects changed traffic.

Texts of requests with `store: false` are not kept here. Recording a query costs the engine 1 to 2 % of a step, whether
the query is learnt from or not.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, TypeAdapter
from torch import Tensor

from adaptation.config import Tuning, free_memory
from adaptation.policy import Arm, Bandit, QueryReport, State
from adaptation.replay_buffer import ReplayBuffer
from adaptation.samples import (
    Admission,
    Quota,
    SampleBuffers,
    TrainingSample,
    UndraftedSignal,
    ValidationSet,
    ValidationText,
    training_sample,
    undrafted_steps,
)
from drafters.feedback import QueryFeedback

_MANY_WITHOUT_TEXT = 64  # queries in a row after which texts count as unavailable
_IN_A_ROW = 8  # consecutive recorded sequences: a step with one computes features of all
_RESTING_SHARE = 1 / 32  # recorded queries while no update promises a gain

_RISE_SLACK = 0.5  # part of a deviation that is not counted, in standard deviations (k)
_RISE_THRESHOLD = 8.0  # sum of deviations above which traffic counts as changed, in standard deviations (h)
_MIN_QUERIES = 24  # queries before a score can be called unusual
_MIN_SCORE_SPREAD = 0.01
_FARTHEST = 3.0  # largest deviation that is counted, so that no single query decides

_MOST_TOKENS = 512  # last tokens of an answer that are scored
_RECENT = 512  # half-life of the recent counts, in tokens
_MEMORY = 32  # queries in the running mean: tokens surprise less as their counts grow
_UNSEEN = 0.1  # added to every count (Lidstone smoothing)
_PRIOR = 1024  # weight of the long-term counts in the recent ones, in tokens (Dirichlet)

_HALF_LIFE = 65_536  # half-life of the long-term counts, in tokens
_MAX_PER_QUERY = 4  # largest count of a token per query: no single text decides
_MIN_STORED = 0.5  # smaller counts are not stored


@dataclass
class _StoredCounts:
    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    tokens: list[NonNegativeInt]
    counts: list[NonNegativeFloat]


_STORED_COUNTS = TypeAdapter(_StoredCounts)


class TokenCounts:
    """Counts how often each token of the target occurred in recent answers, with exponential decay."""

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
        """Serializable state."""
        kept = (self._counts >= _MIN_STORED).nonzero()[:, 0]
        return {"tokens": kept.tolist(), "counts": self._counts[kept].tolist()}

    def restore(self, state: State) -> None:
        """Load what `state` returned. Raises ValueError for anything else, and then changes nothing."""
        stored, counts = _STORED_COUNTS.validate_python(state), torch.zeros_like(self._counts)
        if len(stored.tokens) != len(stored.counts) or max(stored.tokens, default=0) >= counts.shape[0]:
            raise ValueError("counts of tokens do not fit the target's vocabulary")
        counts[torch.tensor(stored.tokens, dtype=torch.int64)] = torch.tensor(stored.counts)
        self._counts = counts


class RisingScores:
    """Detects a rise of the queries' scores, by a cumulative sum (Page, 1954). A fall is ignored.

        z = (x - mean) / sd;   S <- max(0, S + z - k);   changed when S > h

    With k = 0.5 and h = 8, unchanged traffic is called changed once in some 20,000 queries, and a shift of one and a
    half standard deviations is detected after about eight. Mean and deviation are estimated anew after every change.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start estimating mean and deviation from scratch."""
        self._count = 0
        self._mean = self._variance = self._sum = 0.0

    def observe(self, score: float) -> bool:
        """Add a finite score. Returns whether the traffic has changed."""
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
    """Detects changed traffic from two scores of each answer, in nats per token: its surprisal under the long-term
    token counts (new tokens), and how much the recent counts lower that surprisal (repeated tokens)."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._long_term = TokenCounts(vocab)
        self._recent = TokenCounts(vocab, half_life=_RECENT)
        self._is_new, self._is_alike = RisingScores(), RisingScores()

    def observe(self, answer: Sequence[int]) -> bool:
        """Add an answer. Returns whether recent answers have newer tokens, or are more alike, than earlier ones."""
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


class RecordingSampler:
    """Chooses which share of the queries is recorded. The engine's thread calls `draws`; the learning thread sets
    `share`."""

    def __init__(self, usual: float, *, least: float = 0.0, may: Callable[[], bool] = lambda: True) -> None:
        """`usual`: share once there are enough texts; `least`: share that is always recorded; `may`: whether any
        sequence may be recorded now."""
        self.share, self.usual, self.may = 1.0, usual, may
        self._least = least
        self._num_begun = 0

    def draws(self) -> bool:
        """Whether the sequence that begins now is recorded."""
        self._num_begun += 1
        return self.may() and self._num_begun % round(_IN_A_ROW / max(self.share, self._least)) < _IN_A_ROW


@dataclass(frozen=True, slots=True)
class FilteredQuery:
    """Result of filtering one query."""

    admission: Admission
    text: ValidationText | None  # None: the text must not be scored, or is too short
    validates: bool  # whether the text is held for validation
    changed: bool = False  # whether the traffic changed with this query


@dataclass(frozen=True, slots=True)
class Lesson:
    """Arm and samples of one update."""

    arm: Arm
    samples: list[TrainingSample]
    signal: float | None  # mean signal of the queries; None: a rehearsal in idle time, which no arm chose


class FeedbackFilter:
    """Puts finished queries into the buffers or the validation set, as quota and policy decide. A query that is not
    admitted is neither kept nor scored."""

    def __init__(
        self,
        policy: Bandit,
        quota: Quota,
        buffers: SampleBuffers,
        validation: ValidationSet,
        *,
        sampler: RecordingSampler,
        traffic: TrafficMonitor,
    ) -> None:
        self.decisions: Counter[str] = Counter()  # counts by choice and reason, such as "head:gain"
        self.refusals: Counter[str] = Counter()  # counts by the quota's reason
        self.buffers = buffers
        self.validation = validation
        self.policy = policy
        self.sampler = sampler
        self._quota = quota
        self._traffic = traffic
        self._undrafted = UndraftedSignal()
        self._num_without_text = 0

    def take(self, feedback: QueryFeedback, *, learning: bool, updating: bool = True) -> FilteredQuery:
        """Filter a finished query. `learning` False: do not train on it; `updating` False: keep it out of the arms'
        buffers."""
        query = feedback.query
        undrafted = undrafted_steps(feedback)
        positions = feedback.draft_labels.num_rejected + undrafted
        is_offered = feedback.recorded or not query.store
        admission = (
            self._quota.admit(query.client, positions, store=query.store) if is_offered else Admission(0, "resting")
        )
        sample = self._sample(feedback, admission, undrafted)
        example = sample.example if admission.admitted else None
        validates = example is not None and self.validation.draws()
        learns = admission.admitted and learning and not validates
        signal = sample.signal if learns and updating else None
        decision = self.policy.decide(
            QueryReport(query.seconds, signal, feedback.recorded, sample.draft_labels.count > 0)
        )
        if learns and example is not None:
            sample = replace(sample, example=self.buffers.replay.add(example, query))
        if decision.arm is not None:
            self.buffers.add(decision.arm, sample)
        text = None if example is None else self.validation.number(example, query.scope)
        if validates and text is not None:
            self.validation.keep(text)
        if is_offered:
            self._num_without_text = self._num_without_text + 1 if text is None else 0
        self.decisions[f"{decision.arm or 'skip'}:{decision.reason}"] += 1
        if not admission.admitted:
            self.refusals[admission.reason] += 1
        changed = query.store and self._traffic.observe(query.answer)
        if changed:
            self.policy.traffic_changed()
            self.validation.traffic_changed()
        return FilteredQuery(admission, text, validates, changed)

    def due(self) -> Lesson | None:
        """Take the samples of the arm whose update is due. Returns None if no update is due."""
        signals = self.buffers.signals
        arm = self.policy.due(signals)
        return None if arm is None else Lesson(arm, self.buffers.take(arm), fmean(signals[arm]))

    def rehearsal(self) -> Lesson | None:
        """Take a full update from the replay buffer. Returns None if the buffer is empty."""
        samples = self.buffers.rehearsal()
        return Lesson("full", samples, None) if samples else None

    def weights_replaced(self) -> None:
        """Drop the queued samples and make the values of arms less certain, because the serving weights did not come
        from an update."""
        self.policy.traffic_changed()
        self.buffers.clear_queues()

    def forget(self, scope: str | None) -> None:
        """Drop all texts and samples of a scope, or of all scopes if it is None."""
        self.buffers.forget(scope)
        self.validation.forget(scope)

    def choose_share(self, *, learning: bool, collects: bool, watched: bool) -> None:
        """Choose the share of queries to record. Few, if nothing is learnt, no update promises a gain, or no query has
        a text. All, if a drafter is being solved, the validation set is not full, or new weights are watched, as far as
        the ledger covers it. Else the usual share. `collects`: a drafter is solved from texts; `watched`: the served
        weights are new."""
        sees_no_text = self._num_without_text >= _MANY_WITHOUT_TEXT
        promises_nothing = self.policy.resting and self.validation.suffices
        if collects and learning:
            hurries = True
        elif not watched and (not learning or sees_no_text or promises_nothing):
            self.sampler.share = _RESTING_SHARE
            return
        else:
            hurries = watched or not self.validation.is_full
        self.sampler.share = 1.0 if hurries and self.policy.covers(0.0) else self.sampler.usual

    def _sample(self, feedback: QueryFeedback, admission: Admission, undrafted: int) -> TrainingSample:
        """Build a sample from the admitted positions: rejected ones first, then steps without a drafted block."""
        most = min(max(1, admission.positions), self._quota.query_positions)
        sample = training_sample(feedback, most_rejected=most)
        if not admission.admitted or sample.example is None:
            return sample
        self._undrafted.observe(sample)
        missed = self._undrafted.signal(min(undrafted, most - sample.num_rejected))
        return replace(sample, signal=sample.signal + missed)


def build_filter(tuning: Tuning, policy: Bandit, sampler: RecordingSampler, *, vocab: int) -> FeedbackFilter:
    """Build the filter and its parts. `vocab`: size of the target's vocabulary."""
    quota = Quota(client_share=tuning.client_share, free_queries=tuning.client_free_queries)
    max_bytes = int(tuning.replay_share * free_memory())
    buffers = SampleBuffers(
        {"head": tuning.head_queries, "full": tuning.full_queries},
        ReplayBuffer(max_bytes, client_share=tuning.client_share),
        update_samples=tuning.full_steps * tuning.step_texts,
    )
    validation = ValidationSet(
        share=tuning.validation_share,
        enough=tuning.gate_texts,
        max_texts=tuning.validation_texts,
        rng=random.Random(tuning.seed + 1),
    )
    return FeedbackFilter(policy, quota, buffers, validation, sampler=sampler, traffic=TrafficMonitor(vocab))
