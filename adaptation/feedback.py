"""Filters finished queries: each becomes a training sample, a validation text, or neither.

Requests with `store: false` leave no trace here. Recording costs the engine 1 to 2 % of a step, learnt from or not.
"""

import hashlib
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from adaptation.config import Tuning
from adaptation.policy import Bandit, QueryReport
from adaptation.records import QuotaReason
from adaptation.samples import (
    SampleBuffers,
    TrainingSample,
    UndraftedSignal,
    ValidationSet,
    ValidationText,
    training_sample,
    undrafted_steps,
)
from drafters.feedback import QueryFeedback

_QUERY_POSITIONS = 32  # rejected positions of a query that are learnt from, at most
_HALF_LIFE_SECONDS = 600.0  # after which a client's past use counts half
_MAX_CLIENTS = 4096  # that the quota remembers
_TICKS = 64  # per half-life: counts decay once per tick, so that a query costs no walk over all clients
_LEAST_OFFERS = 2.0  # queries of an active client; fewer would lower the share of others without using the own one
_NEGLIGIBLE = 0.01  # queries or positions
_KEPT_OF_FULL = 3, 4
_MANY_WITHOUT_TEXT = 64  # queries
_IN_A_ROW = 8  # recorded sequences: a step with one recorded sequence costs as much as if all were


@dataclass(frozen=True, slots=True)
class Admission:
    """How many rejected positions of a query may be learnt from; 0 unless the reason is `admitted`."""

    positions: int
    reason: QuotaReason

    @property
    def admitted(self) -> bool:
        """Whether the query may be learnt from."""
        return self.positions > 0


@dataclass(slots=True)
class _Use:
    offers: float = 0.0  # queries
    taken: float = 0.0  # positions


class Quota:
    """Admits queries while their client has at most its share of the recent training data.

    The share is `client_share`, or an equal one with few active clients. Below `free_queries` all are admitted. Clients
    are stored as hashes with a random key of this process; of more than `max_clients` the least active are forgotten.
    """

    def __init__(
        self,
        *,
        client_share: float,
        free_queries: int,
        clock: Callable[[], float] = time.time,
        query_positions: int = _QUERY_POSITIONS,
        half_life_seconds: float = _HALF_LIFE_SECONDS,
        max_clients: int = _MAX_CLIENTS,
    ) -> None:
        self.query_positions = query_positions
        self._client_share = client_share
        self._free_positions = free_queries * query_positions
        self._tick_seconds = half_life_seconds / _TICKS
        self._max_clients = max_clients
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._uses: dict[bytes, _Use] = {}
        self._num_active = 0
        self._taken = 0.0
        self._ticked_at = clock()

    @property
    def share(self) -> float:
        """Share of the training data that one client may have now."""
        return max(self._client_share, 1 / max(1, self._num_active))

    def admit(self, client: str, positions: int, *, store: bool) -> Admission:
        """Admit or refuse a finished query with so many rejected positions, and count it."""
        if not store:
            return Admission(0, "not_stored")
        if positions < 1:
            return Admission(0, "nothing_to_learn")
        self._forget()
        use = self._offer(self._hash(client))
        # The total is the sum of the parts up to rounding.
        if use.taken > max(self._free_positions, self.share * self._taken * (1 + 1e-9)):
            return Admission(0, "over_share")
        granted = min(positions, self.query_positions)
        use.taken += granted
        self._taken += granted
        return Admission(granted, "admitted")

    def _hash(self, client: str) -> bytes:
        return hashlib.blake2b(client.encode("utf-8", "surrogatepass"), digest_size=16, key=self._key).digest()

    def _offer(self, name: bytes) -> _Use:
        if name not in self._uses and len(self._uses) >= self._max_clients:
            self._make_room()
        use = self._uses.setdefault(name, _Use())
        was_active = use.offers >= _LEAST_OFFERS
        use.offers += 1
        self._num_active += not was_active and use.offers >= _LEAST_OFFERS
        return use

    def _forget(self) -> None:
        ticks = int((self._clock() - self._ticked_at) / self._tick_seconds)
        if ticks < 1:
            return
        self._ticked_at += ticks * self._tick_seconds
        kept = 0.5 ** (ticks / _TICKS)
        for use in self._uses.values():
            use.offers *= kept
            use.taken *= kept
        self._keep({name: use for name, use in self._uses.items() if max(use.offers, use.taken) > _NEGLIGIBLE})

    def _make_room(self) -> None:
        """Forget the least active quarter, so that many new clients cost one sort per quarter."""
        by_use = sorted(self._uses.items(), key=lambda item: (item[1].taken, item[1].offers), reverse=True)
        part, whole = _KEPT_OF_FULL
        self._keep(dict(by_use[: self._max_clients * part // whole]))

    def _keep(self, uses: dict[bytes, _Use]) -> None:
        self._uses = uses
        self._num_active = sum(use.offers >= _LEAST_OFFERS for use in uses.values())
        self._taken = sum(use.taken for use in uses.values())


@dataclass(frozen=True, slots=True)
class FilteredQuery:
    """The decision about one query."""

    admission: Admission
    text: ValidationText | None  # its text, if it may be scored
    validates: bool  # it is held for validation


class FeedbackFilter:
    """Fills buffers and validation set as quota and policy decide. What is not admitted is neither kept nor scored."""

    def __init__(self, policy: Bandit, quota: Quota, buffers: SampleBuffers, validation: ValidationSet) -> None:
        self.decisions: Counter[str] = Counter()  # by choice and reason, "head:gain"
        self.refusals: Counter[str] = Counter()  # by reason of the quota
        self.buffers = buffers
        self.validation = validation
        self.policy = policy
        self._quota = quota
        self._undrafted = UndraftedSignal()
        self._num_without_text = 0

    @property
    def sees_no_text(self) -> bool:
        """Whether many queries in a row had no text to score, so that no update can be validated."""
        return self._num_without_text >= _MANY_WITHOUT_TEXT

    def take(self, feedback: QueryFeedback, *, learning: bool, updating: bool = True) -> FilteredQuery:
        """Take in a finished query. `learning` False: it is only counted; `updating` False: no update will use it
        yet."""
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
            self.buffers.remember(sample)
        if decision.arm is not None:
            self.buffers.add(decision.arm, sample)
        text = None if example is None else self.validation.number(example)
        if validates and text is not None:
            self.validation.keep(text)
        if is_offered:
            self._num_without_text = self._num_without_text + 1 if text is None else 0
        self.decisions[f"{decision.arm or 'skip'}:{decision.reason}"] += 1
        if not admission.admitted:
            self.refusals[admission.reason] += 1
        return FilteredQuery(admission, text, validates)

    def _sample(self, feedback: QueryFeedback, admission: Admission, undrafted: int) -> TrainingSample:
        """A sample of the admitted positions: rejected ones first, then steps without a drafted block."""
        most = min(max(1, admission.positions), self._quota.query_positions)
        sample = training_sample(feedback, most_rejected=most)
        if not admission.admitted or sample.example is None:
            return sample
        self._undrafted.observe(sample)
        missed = self._undrafted.signal(min(undrafted, most - sample.num_rejected))
        return replace(sample, signal=sample.signal + missed)


class RecordingSampler:
    """Chooses the queries that are recorded: a share of all. `draws` belongs to the engine's thread, `share` to the
    learning thread."""

    def __init__(self, usual: float, *, least: float = 0.0) -> None:
        """`usual`: share once there are texts enough; `least`: share that is always recorded."""
        self.share, self.usual = 1.0, usual
        self._least = least
        self._num_begun = 0

    def draws(self) -> bool:
        """Whether the sequence that begins now is recorded."""
        self._num_begun += 1
        return self._num_begun % round(_IN_A_ROW / max(self.share, self._least)) < _IN_A_ROW


def build_filter(tuning: Tuning, policy: Bandit) -> FeedbackFilter:
    """Build the filter with its quota, buffers and validation set."""
    quota = Quota(client_share=tuning.client_share, free_queries=tuning.client_free_queries)
    buffers = SampleBuffers(
        {"head": tuning.head_queries, "full": tuning.full_queries},
        replay_texts=tuning.replay_texts,
        update_samples=tuning.full_steps * tuning.step_texts,
        rng=random.Random(tuning.seed + 2),
    )
    validation = ValidationSet(
        share=tuning.validation_share,
        enough=tuning.gate_texts,
        max_texts=tuning.validation_texts,
        rng=random.Random(tuning.seed + 1),
    )
    return FeedbackFilter(policy, quota, buffers, validation)
