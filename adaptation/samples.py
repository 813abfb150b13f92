"""Training samples of finished queries, the quota of each client, queues of samples, and the validation set.

    s = sum over rejected positions of (1 - r),   r = the drafter's probability of the target's token   (section 3.4)

A step without a drafted block counts as much as recently rejected positions did on average: drafting is off where it
does not pay, but a drafter that had learnt these texts might pay.
"""

import hashlib
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from adaptation.policy import ARMS, Arm
from adaptation.records import QuotaReason
from adaptation.replay_buffer import ReplayBuffer
from drafters.feedback import DraftLabels, QueryFeedback
from drafters.protocol import Noise
from drafters.training.corpus import Example, RecordedMemory

_QUERY_POSITIONS = 32  # largest number of rejected positions learnt from per query
_HALF_LIFE_SECONDS = 600.0  # half-life of a client's past use
_MAX_CLIENTS = 4096  # clients that the quota remembers at most
_TICKS = 64  # ticks per half-life: counts decay once per tick, so that a query costs no walk over all clients
_LEAST_OFFERS = 2.0  # queries from which a client is active: one that hardly asks must not lower the share of others
_NEGLIGIBLE = 0.01  # queries or positions below which a client is forgotten
_KEPT_OF_FULL = 3, 4
_ACCEPTED_PER_REJECTED = 3  # accepted labels per rejected one: the rank head has to see both
_LEAST_PROMPT = 2  # least prompt positions: the first label needs a position with features and a token before it
_LEAST_ANSWER = 4  # least labelled tokens: fewer cannot score a drafter
_MISSED_MEMORY = 512  # rejected positions in the running mean of 1 - r
_WAITING_FOR_SUMS = 256  # texts from which a drafter is yet to be made
_MAX_POSITIONS = 4096  # rejected positions in all buffers
_HURRIED_SHARE = 0.5  # minimum share of queries held out while the validation set is less than a quarter full


@dataclass(frozen=True, slots=True)
class Admission:
    """Number of a query's rejected positions that may be learnt from; 0 unless the reason is `admitted`."""

    positions: int
    reason: QuotaReason

    @property
    def admitted(self) -> bool:
        """Whether the query may be learnt from."""
        return self.positions > 0


@dataclass(slots=True)
class _Use:
    offers: float = 0.0  # finished queries, decayed
    taken: float = 0.0  # admitted positions, decayed


class Quota:
    """Admits a query while its client has at most its share of the recent training data.

    The share is `client_share`, or an equal share if few clients are active. Below `free_queries` all queries of a
    client are admitted. Clients are stored as hashes under a random key of this process; beyond `max_clients` the least
    active are forgotten.
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
        """Admit or refuse a finished query by its client and number of rejected positions, and count it."""
        if not store:
            return Admission(0, "not_stored")
        if positions < 1:
            return Admission(0, "nothing_to_learn")
        self._forget()
        use = self._offer(self._hash(client))
        # The factor allows for rounding: the total is a sum of the parts.
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
class TrainingSample:
    """Training data from one query."""

    signal: float  # s, summed over kept draft labels and steps without a drafted block
    num_rejected: int
    draft_labels: DraftLabels
    example: Example | None  # None: too little text for a full update
    noise: Noise  # sampling noise at the position of each label, which counts as depth 1 of a tree
    scope: str = ""  # namespace of the past answers that it belongs to


_NOTHING = torch.empty(0)


def replayed_sample(example: Example) -> TrainingSample:
    """Build a sample of a text alone, for full updates."""
    return TrainingSample(
        signal=0.0,
        num_rejected=0,
        draft_labels=DraftLabels(*(_NOTHING for _ in DraftLabels.__slots__)),
        example=example,
        noise=Noise.of_text(0, 0.0, _NOTHING.long()),
    )


class UndraftedSignal:
    """Estimates the signal of steps without a drafted block."""

    def __init__(self) -> None:
        self._missed = 1.0  # mean 1 - r of a rejected position
        self._num_observed = 1

    def observe(self, sample: TrainingSample) -> None:
        """Update the mean with a sample's drafted blocks."""
        self._num_observed = min(_MISSED_MEMORY, self._num_observed + sample.num_rejected)
        self._missed += (sample.signal - sample.num_rejected * self._missed) / self._num_observed

    def signal(self, steps: int) -> float:
        """Expected signal of this many steps without a drafted block."""
        return steps * self._missed


def undrafted_steps(feedback: QueryFeedback) -> int:
    """Number of steps of a query that have no label of a rejected draft."""
    return max(0, feedback.query.num_steps - feedback.draft_labels.num_rejected)


def training_sample(feedback: QueryFeedback, *, most_rejected: int) -> TrainingSample:
    """Build a sample from the newest draft labels of a query: at most `most_rejected` rejected ones, and three times as
    many accepted ones."""
    labels, query = _newest(feedback.draft_labels, most_rejected), feedback.query
    signal = float((1.0 - labels.chances[labels.rejected].double()).sum())
    noise = Noise.of_text(query.seed, query.temperature, query.offset + labels.positions - 1)
    return TrainingSample(signal, labels.num_rejected, labels, example_of(feedback), noise, query.scope)


def example_of(feedback: QueryFeedback) -> Example | None:
    """Build the example of a query's text, from its first feature on, for full updates and replays. Returns None if the
    text is too short."""
    tokens = torch.tensor(feedback.query.tokens[feedback.first :])
    prompt = max(feedback.prompt - feedback.first, _LEAST_PROMPT)
    unlabelled = prompt + feedback.first - feedback.prompt
    if tokens.shape[0] - prompt < _LEAST_ANSWER:
        return None
    last = feedback.features.new_zeros(1, feedback.features.shape[1])
    memory = None
    if feedback.past is not None and feedback.regression is not None:
        before, lines = torch.tensor(feedback.query.tokens[: feedback.first]), feedback.past[unlabelled:]
        memory = RecordedMemory(before.long(), lines, feedback.regression, feedback.query.nodes_of_drafts)
    return Example(
        tokens=tokens,
        features=torch.cat([feedback.features, last]),
        prompt=prompt,
        top_ids=feedback.top_ids[unlabelled:],
        top_logprobs=feedback.top_logprobs[unlabelled:],
        temperature=feedback.query.temperature,
        seed=feedback.query.seed,
        start=feedback.query.offset + feedback.first,
        memory=memory,
    )


def _newest(labels: DraftLabels, most_rejected: int) -> DraftLabels:
    later_rejected = labels.rejected.flip(0).cumsum(0).flip(0)
    later_accepted = (~labels.rejected).flip(0).cumsum(0).flip(0)
    most_accepted = _ACCEPTED_PER_REJECTED * most_rejected
    return labels.take(torch.where(labels.rejected, later_rejected <= most_rejected, later_accepted <= most_accepted))


class SampleBuffers:
    """Holds one bounded queue of samples per arm, and the replay buffer. Samples dropped from a queue are counted.

    Full updates also train on the next texts of the replay buffer's pass, so that they do not overfit to a few texts.
    """

    def __init__(
        self,
        max_samples: Mapping[Arm, int],
        replay: ReplayBuffer,
        *,
        update_samples: int,
        max_positions: int = _MAX_POSITIONS,
    ) -> None:
        """`update_samples`: samples per full update."""
        self.num_dropped = 0
        self.replay = replay
        self._max_samples = max_samples
        self._max_positions = max_positions
        self.for_sums: deque[ValidationText] = deque(maxlen=_WAITING_FOR_SUMS)
        self._waiting: deque[tuple[Arm, TrainingSample]] = deque()
        self._taken: list[tuple[Arm, TrainingSample]] = []
        self._update_samples = update_samples

    @property
    def positions(self) -> int:
        """Rejected positions in all queues."""
        return sum(sample.num_rejected for _, sample in self._waiting)

    @property
    def signals(self) -> dict[Arm, list[float]]:
        """Signals of the queued samples, by arm, oldest first."""
        return {arm: [sample.signal for name, sample in self._waiting if name == arm] for arm in ARMS}

    @property
    def counts(self) -> dict[Arm, int]:
        """Queued samples by arm."""
        return {arm: len(signals) for arm, signals in self.signals.items()}

    @property
    def updates_of_pass(self) -> int:
        """Number of full updates that train on every text of the replay buffer once."""
        return -(-len(self.replay) // self._update_samples)

    def add(self, arm: Arm, sample: TrainingSample) -> None:
        """Queue a sample, without its text if it is for the head update. If a queue is full, the oldest sample is
        dropped."""
        self._waiting.append((arm, replace(sample, example=None) if arm == "head" else sample))
        if self.counts[arm] > self._max_samples[arm]:
            self._drop(next(index for index, (name, _) in enumerate(self._waiting) if name == arm))
        while self.positions > self._max_positions:
            self._drop(0)

    def take(self, arm: Arm) -> list[TrainingSample]:
        """Remove and return the samples of an arm, oldest first; for a full update, replayed samples come before
        them."""
        self._taken = [entry for entry in self._waiting if entry[0] == arm]
        self._waiting = deque(entry for entry in self._waiting if entry[0] != arm)
        taken = [sample for _, sample in self._taken]
        return taken if arm == "head" else self._replayed(taken) + taken

    def put_back(self) -> None:
        """Return the samples of the last `take` or `rehearsal`, to the front of their queue: their update was
        interrupted."""
        self._waiting.extendleft(reversed(self._taken))
        self._taken = []
        self.replay.put_back()

    def rehearsal(self) -> list[TrainingSample]:
        """Take the next texts of the replay buffer for an update in idle time."""
        self._taken = []
        return self._replayed(())

    def _replayed(self, new: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Take as many texts of the replay buffer as an update has room for next to the `new` samples."""
        texts = [sample.example for sample in new if sample.example is not None]
        return [replayed_sample(example) for example in self.replay.take(self._update_samples, new=texts)]

    def forget(self, scope: str | None) -> None:
        """Drop all that belongs to a scope, or everything if it is None."""
        self._taken = []
        self._waiting = deque(entry for entry in self._waiting if scope not in (None, entry[1].scope))
        self.for_sums = without(scope, self.for_sums)
        self.replay.forget(scope)

    def _drop(self, index: int) -> None:
        del self._waiting[index]
        self.num_dropped += 1

    def clear_queues(self) -> None:
        """Drop the queued samples, because their drafter is no longer served. Texts stay: they are the target's."""
        self._waiting.clear()


@dataclass(frozen=True, slots=True)
class ValidationText:
    """A text for replays, with the number under which its scores are cached."""

    number: int
    example: Example
    scope: str = ""


def without(scope: str | None, texts: "deque[ValidationText]") -> "deque[ValidationText]":
    """Return a copy without the texts of a scope, or of all scopes if it is None."""
    return deque((text for text in texts if scope not in (None, text.scope)), texts.maxlen)


class ValidationSet:
    """Holds the latest texts of a random share of the queries. These queries are never trained on.

    Until it is a quarter full, every second query or so is held. After a change of traffic, only later texts count.
    """

    def __init__(self, *, share: float, enough: int, max_texts: int, rng: random.Random) -> None:
        self._share = share
        self._enough = enough
        self._rng = rng
        self._number = 0
        self._max_texts = max_texts
        self._texts: deque[ValidationText] = deque(maxlen=max_texts)
        self._first_current = 0  # number of the first text since the last change of traffic

    @property
    def texts(self) -> Sequence[ValidationText]:
        """All kept texts, oldest first."""
        return tuple(self._texts)

    @property
    def current(self) -> Sequence[ValidationText]:
        """The kept texts since the last change of traffic."""
        return tuple(text for text in self._texts if text.number >= self._first_current)

    @property
    def suffices(self) -> bool:
        """Whether there are enough current texts to validate an update."""
        return len(self.current) >= self._enough

    @property
    def is_full(self) -> bool:
        """Whether the set is full of texts since the last change of traffic."""
        return len(self.current) == self._max_texts

    def traffic_changed(self) -> None:
        """Count only texts from now on as current."""
        self._first_current = self._number + 1

    def draws(self) -> bool:
        """Draw at random whether the next query is held for validation."""
        least = _HURRIED_SHARE if 4 * len(self.current) < self._max_texts else 0.0
        return self._rng.random() < max(self._share, least)

    def number(self, example: Example, scope: str) -> ValidationText:
        """Give a text its number, without adding it to the set."""
        self._number += 1
        return ValidationText(self._number, example, scope)

    def keep(self, text: ValidationText) -> None:
        """Add a text to the set."""
        self._texts.append(text)

    def forget(self, scope: str | None) -> None:
        """Drop the texts of a scope, or all texts if it is None."""
        self._texts = without(scope, self._texts)
