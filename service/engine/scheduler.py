"""Which sequences take part in the next step, and with how many rows.

Decoding sequences take part in every step, prompts are computed in chunks in the same steps. The client served least is
admitted first and its prompts come first. A sequence starts after its cached prefix. When slots run out, the cache
evicts what was used least recently, then the cheapest sequence is preempted; what it loses is computed again later, to
the same bits.
"""

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor

from drafters.protocol import HostMetadata
from kernels.rows import ExtendRows
from kernels.tree_attention import MAX_NODES
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.prefix_cache import PrefixCache, PrefixLease
from service.engine.sequence import Sequence

_EVICT_AT_ONCE = 256
"""Slots; so that a full cache does not cost an eviction in every step."""
_OFTEN = 2  # preemptions after which others are preempted first

_FIRST_GUESS = 32.0  # tokens of an answer
_RATE = 0.05  # of the moving mean of answers' lengths
_LEAST_SHARE = 0.25  # of the mean length that an answer is expected to go on for, however long it is already

PROMPT_SHARE = 0.5
"""Service of computing one prompt token, against 1 for generating a token."""


@dataclass(frozen=True, slots=True)
class Scheduled(ExtendRows):
    """A sequence's share of a step: its next pending tokens."""

    sequence: Sequence

    @staticmethod
    def of(sequence: Sequence, num_rows: int) -> "Scheduled":
        """Schedule the sequence's next `num_rows` pending tokens."""
        first = sequence.num_computed
        tokens = sequence.tokens[first : first + num_rows]
        return Scheduled(sequence.table_row, first, tokens, num_rows == sequence.num_pending, sequence)

    @property
    def decodes(self) -> bool:
        """Whether it is a root: one pending token, below which a draft tree may grow."""
        return self.num_rows == 1 and self.completes


@dataclass(frozen=True)
class StepBatch:
    """The sequences of a step; decoding ones stand first."""

    items: list[Scheduled]
    started: list[Sequence]  # those that start to run, or start again after preemption
    num_drafting: int | None = None  # how many of the decoding ones, the first, run the drafter; None: all
    follows: bool = True  # whether the drafter takes in what is read and committed, as some sequence may draft later

    @cached_property
    def decoding(self) -> list[Sequence]:
        """Sequences whose last token alone is pending."""
        return [item.sequence for item in self.items if item.decodes]

    @cached_property
    def completing(self) -> list[Sequence]:
        """Sequences that choose a token: the decoding ones, and those whose prompt ends in this step."""
        return [item.sequence for item in self.items if item.completes]

    @cached_property
    def host(self) -> HostMetadata:
        """Rows and roots of the completing sequences."""
        roots = tuple(len(sequence.tokens) - 1 for sequence in self.completing)
        return HostMetadata(tuple(sequence.table_row for sequence in self.completing), roots)

    @cached_property
    def num_extend_rows(self) -> int:
        """Rows of the step without drafted nodes."""
        return sum(item.num_rows for item in self.items)


class Scheduler:
    """Owner of the waiting sequences, in order of arrival, and of the running ones, in the order they started in."""

    def __init__(
        self,
        slots: SlotPool,
        table: SlotTable,
        *,
        prefill_chunk: int,
        on_stop: Callable[[Sequence], None] = lambda sequence: None,
        cache: PrefixCache | None = None,
        tree_nodes: int = MAX_NODES,
    ) -> None:
        """`on_stop` is called with each sequence that stops running, finished or preempted, while it has its row.
        Cached prefixes leave room for trees of `tree_nodes`."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._slots = slots
        self._table = table
        self._prefill_chunk = prefill_chunk
        self._on_stop = on_stop
        self._cache = cache or PrefixCache(table.slots.device, keep=False)
        self._tree_nodes = tree_nodes
        self._service = ServiceCounters()
        self._forecast = Forecast()
        self._arrivals = 0
        self._preemptions = 0

    @property
    def num_available(self) -> int:
        """Slots that are free, or hold cached prefixes that may be evicted."""
        return self._slots.num_free + self._cache.num_evictable

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        self._service.enter(sequence.client)
        insort(self.waiting, sequence, key=attrgetter("arrival"))

    def schedule(self) -> StepBatch:
        """Choose the next step's sequences, and free slots for them."""
        self._note_progress()
        self._preempt_until_decoding_fits()
        started = self._admit()
        decoding = [Scheduled.of(sequence, 1) for sequence in self.running if not sequence.is_prefilling]
        chunks = self._chunks([sequence for sequence in self.running if sequence.is_prefilling], len(decoding))
        batch = StepBatch(decoding + chunks, started)
        self._clear_slots(batch.num_extend_rows + len(decoding) * self._tree_nodes)
        return batch

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and free its slots."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self._service.settle(sequence)
            self._forecast.observe(sequence)
            self._stop(sequence)
        self._service.leave(sequence.client)

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to its place among the waiting ones."""
        self._service.settle(sequence)
        self._stop(sequence)
        sequence.num_computed = 0
        sequence.preemptions += 1
        self._preemptions += 1
        insort(self.waiting, sequence, key=attrgetter("arrival"))

    def take_preemptions(self) -> int:
        """Preemptions since the last call."""
        count, self._preemptions = self._preemptions, 0
        return count

    def forget_prefixes(self) -> None:
        """Free all cached prefixes that no running sequence uses: their slots have been overwritten."""
        self._slots.free(self._cache.evict(self._cache.num_evictable))

    def held_slots(self) -> Tensor:
        """Slots of the cache and of running sequences, each once (for conservation checks). # -> [held] int64"""
        return torch.cat([self._cache.held(), *map(self._own_slots, self.running)])

    def _own_slots(self, sequence: Sequence) -> Tensor:
        """A running sequence's slots that are not the cache's. # -> [positions] int64"""
        return self._table.slots[sequence.table_row, sequence.num_shared : sequence.num_computed]

    def _note_progress(self) -> None:
        """Charge what the last step served, and publish prompts that have just been computed."""
        for sequence in self.running:
            self._service.settle(sequence)
            if sequence.lease is not None and not sequence.is_prefilling and not sequence.lease.is_published:
                self._cache.publish(sequence.lease, sequence.tokens, self._own_slots(sequence))
                sequence.lease.is_published = True

    def _preempt_until_decoding_fits(self) -> None:
        """Preempt until each decoding sequence has a slot. One always has: start-up checked that the pool holds the
        longest sequence."""
        while sum(not sequence.is_prefilling for sequence in self.running) > self.num_available or (
            len(self.running) > 1 and self.num_available == 0
        ):
            victim = cheapest(self.running, self.running, self._cache)
            assert victim is not None, "the pool does not hold the longest sequence"
            self.preempt(victim)

    def _stop(self, sequence: Sequence) -> None:
        self._on_stop(sequence)
        self.running.remove(sequence)
        assert sequence.lease is not None, "a running sequence has a lease"
        slots = self._table.release_row(sequence.table_row, sequence.num_computed)
        unused = self._cache.release(sequence.lease, sequence.tokens, slots[sequence.num_shared :])
        self._slots.free(unused)
        sequence.row = sequence.lease = None

    def _admit(self) -> list[Sequence]:
        """Start waiting sequences while there is room, those of the client served least first."""
        started: list[Sequence] = []
        while (sequence := self._next_to_start()) is not None:
            if not self._has_room(sequence) and not self._make_way(sequence, started):
                break
            self._start(sequence)
            started.append(sequence)
        return started

    def _next_to_start(self) -> Sequence | None:
        """The first waiting sequence of the client served least. None overtakes one that does not fit, but one whose
        prefix is being computed right now lets others pass."""
        queues: dict[str, list[Sequence]] = {}
        for sequence in self.waiting:
            queues.setdefault(sequence.client, []).append(sequence)
        served = {client: self._service.served(client) for client in queues}
        for sequence in self.running:
            if sequence.client in served:
                served[sequence.client] += self._forecast.claim(sequence)
        for client in sorted(queues, key=served.__getitem__):
            for sequence in sorted(queues[client], key=lambda sequence: sequence.request.priority):
                if not self._prefix_is_being_computed(sequence):
                    return sequence
        return None

    def _prefix_is_being_computed(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to publish much of this one's prompt."""
        return any(
            self._cache.pays_to_wait(sequence.cache_namespace, sequence.tokens, other.cache_namespace, other.tokens)
            for other in self.running
            if other.is_prefilling
        )

    def _has_room(self, sequence: Sequence, victims: Items[Sequence] = ()) -> bool:
        """Whether, once `victims` are preempted, there is a table row, and slots for what it and the running sequences
        will probably need."""
        others = [other for other in self.running if other not in victims]
        if not others:
            return True
        claimed = sum(self._forecast.claim(other) for other in others) + self._tree_nodes
        claimed += self._forecast.claim(sequence)
        claimed -= self._cache.leased(sequence.cache_namespace, sequence.tokens, excluding=_leases(victims))
        available = self.num_available + _freed_by(victims, self._cache)
        return self._table.num_free_rows + len(victims) > 0 and claimed <= available

    def _make_way(self, sequence: Sequence, started: Items[Sequence]) -> bool:
        """For a client that runs nothing, preempt sequences of clients that run several, the cheapest first. Returns
        whether there is room then; else none is preempted."""
        if any(other.client == sequence.client for other in self.running):
            return False
        victims: list[Sequence] = []
        while not self._has_room(sequence, victims):
            clients = [other.client for other in self.running if other not in victims]
            spare = [
                other
                for other in self.running
                if clients.count(other.client) > 1 and other not in victims and other not in started
            ]
            victim = cheapest(spare, self.running, self._cache)
            if victim is None:
                return False
            victims.append(victim)
        for victim in victims:
            self.preempt(victim)
        return True

    def _start(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        sequence.row = self._table.take_row()
        sequence.lease = self._cache.acquire(sequence.cache_namespace, sequence.tokens)
        sequence.num_computed = sequence.lease.length
        if sequence.started_seconds is None:
            sequence.num_cached = sequence.num_computed
            sequence.started_seconds = time.monotonic()
        self._table.slots[sequence.row, : sequence.lease.length] = sequence.lease.slots
        self._service.waive(sequence)
        self.running.append(sequence)

    def _chunks(self, prefilling: Items[Sequence], num_decoding: int) -> list[Scheduled]:
        """Share one chunk of prompt rows among the prefilling sequences, the client served least first."""
        left = min(self._prefill_chunk, self.num_available - num_decoding)
        chunks = []
        for sequence in sorted(prefilling, key=lambda sequence: self._service.served(sequence.client)):
            num_rows = min(sequence.num_pending, left)
            if num_rows > 0:
                chunks.append(Scheduled.of(sequence, num_rows))
                left -= num_rows
        return chunks

    def _clear_slots(self, wanted: int) -> None:
        """Evict cached prefixes until `wanted` slots are free, or none is left to evict."""
        if wanted > self._slots.num_free:
            self._slots.free(self._cache.evict(max(wanted - self._slots.num_free, _EVICT_AT_ONCE)))


class ServiceCounters:
    """Tokens served by client ("virtual token counters", arXiv 2401.00588): who is admitted next, whose prompt comes
    first. Running sequences decode in every step, so no counter makes the machine wait.

    A client that comes back starts level with the least served: it has no claim on service it did not ask for. Counters
    of absent clients are kept only while they are above that.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._present: Counter[str] = Counter()  # waiting and running sequences

    def enter(self, client: str) -> None:
        """Count one more sequence of this client."""
        if not self._present:
            self._served = {client: 0.0}
        elif client not in self._present:
            least = min(self._served[other] for other in self._present)
            self._served = {
                other: count for other, count in self._served.items() if other in self._present or count > least
            }
            self._served[client] = max(least, self._served.get(client, least))
        self._present[client] += 1

    def leave(self, client: str) -> None:
        """Count one sequence less."""
        self._present[client] -= 1
        if not self._present[client]:
            del self._present[client]

    def settle(self, sequence: Sequence) -> None:
        """Charge a client for what its running sequence was served since the last call."""
        served = service_of(sequence)
        # Tokens computed again after a preemption are not charged twice.
        self._served[sequence.client] += max(0.0, served - sequence.charged_tokens)
        sequence.charged_tokens = max(served, sequence.charged_tokens)

    def waive(self, sequence: Sequence) -> None:
        """Charge nothing for the prefix that a sequence found in the cache."""
        sequence.charged_tokens = max(service_of(sequence), sequence.charged_tokens)

    def served(self, client: str) -> float:
        """Tokens that a present client was served."""
        return self._served[client]


def service_of(sequence: Sequence) -> float:
    """Tokens a sequence was served, those of its prompt at their share."""
    return PROMPT_SHARE * min(sequence.num_computed, sequence.num_prompt) + sequence.num_generated


class Forecast:
    """Predicts how many slots a sequence will need before it ends: its pending tokens, and an answer as long as recent
    ones were."""

    def __init__(self) -> None:
        self._mean_tokens = _FIRST_GUESS

    def observe(self, sequence: Sequence) -> None:
        """Take in the length of an answer that ended."""
        self._mean_tokens += _RATE * (sequence.num_generated - self._mean_tokens)

    def claim(self, sequence: Sequence) -> int:
        """Slots that a sequence will still need; an answer beyond the mean length goes on for a part of it."""
        expected = max(self._mean_tokens - sequence.num_generated, _LEAST_SHARE * self._mean_tokens)
        return sequence.num_pending + min(sequence.num_remaining, round(expected))


def cheapest(candidates: Items[Sequence], running: Items[Sequence], cache: PrefixCache) -> Sequence | None:
    """The sequence to preempt: lowest priority, not preempted often, least to compute again, newest, in this order.

    The oldest is never preempted, so every sequence gets through; None if no candidate is left.
    """
    oldest = min(running, key=attrgetter("arrival"))
    return min(
        (sequence for sequence in candidates if sequence is not oldest),
        key=lambda sequence: (
            -sequence.request.priority,
            sequence.preemptions >= _OFTEN,
            _freed_by([sequence], cache),
            -sequence.arrival,
        ),
        default=None,
    )


def _freed_by(victims: Items[Sequence], cache: PrefixCache) -> int:
    """Slots that become free or evictable when all of these are preempted: positions that may have to be computed
    again."""
    own = sum(victim.num_computed - victim.num_shared for victim in victims)
    return own + cache.held_only_by(_leases(victims))


def _leases(sequences: Items[Sequence]) -> list[PrefixLease]:
    return [sequence.lease for sequence in sequences if sequence.lease is not None]
