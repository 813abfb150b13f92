"""Which sequences take part in the next step, and with how many rows.

Decoding sequences take part in every step, prompts are read in chunks in the same steps. The client that was served
least is admitted first and its prompts are read first. Texts begin where the prefix cache ends; when slots run out, the
cache gives back what was used least recently, then the cheapest sequence waits; what it loses is computed again later,
to the same bits.
"""

import time
from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from drafters.protocol import HostMetadata
from kernels.tree_attention import MAX_NODES
from service.engine.fairness import Accounts
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.prefix_cache import Lease, PrefixCache
from service.engine.rows import ExtendRows
from service.engine.sequence import Sequence

_EVICT_AT_ONCE = 256
"""Slots; so that a full cache does not cost an eviction in every step."""
_OFTEN = 2  # preemptions, after which others give way first

_FIRST_GUESS = 32.0  # tokens of an answer
_RATE = 0.05
_NEVER_LESS = 0.25


@dataclass(frozen=True, slots=True)
class Scheduled(ExtendRows):
    """A sequence's share of a step: its next pending tokens."""

    sequence: Sequence

    @staticmethod
    def of(sequence: Sequence, num_rows: int) -> "Scheduled":
        first = sequence.num_computed
        tokens = sequence.tokens[first : first + num_rows]
        return Scheduled(sequence.table_row, first, tokens, num_rows == sequence.num_pending, sequence)

    @property
    def drafts(self) -> bool:
        """Whether a draft tree may hang below it."""
        return self.num_rows == 1 and self.completes


@dataclass(frozen=True)
class Batch:
    """Everyone who takes part in a step; the drafting sequences, which are completing ones, stand first."""

    items: list[Scheduled]
    started: list[Sequence]  # those that have just begun, or begun again, to run
    num_asked: int | None = None  # so many of the drafting ones, the first, ask the drafter; None: all

    @cached_property
    def drafting(self) -> list[Sequence]:
        return [item.sequence for item in self.items if item.drafts]

    @cached_property
    def completing(self) -> list[Sequence]:
        return [item.sequence for item in self.items if item.completes]

    @cached_property
    def host(self) -> HostMetadata:
        """Rows and roots of the completing sequences."""
        roots = tuple(len(sequence.tokens) - 1 for sequence in self.completing)
        return HostMetadata(tuple(sequence.table_row for sequence in self.completing), roots)

    @cached_property
    def num_extend_rows(self) -> int:
        """Rows that run whatever the budget."""
        return sum(item.num_rows for item in self.items)


class Scheduler:
    """Owner of the waiting sequences, in order of arrival, and of the running ones, in the order in which they began to
    run."""

    def __init__(
        self,
        slots: SlotPool,
        table: SlotTable,
        *,
        prefill_chunk: int,
        released: Callable[[Sequence], None] = lambda sequence: None,
        cache: PrefixCache | None = None,
        tree_nodes: int = MAX_NODES,
        accounts: Accounts | None = None,
    ) -> None:
        """`released` hears of every sequence that stops running, finished or preempted, while it still has its row.
        Cached prefixes leave room for trees of `tree_nodes`."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._slots = slots
        self._table = table
        self._prefill_chunk = prefill_chunk
        self._released = released
        self._cache = cache or PrefixCache(table.slots.device, keep=False)
        self._tree_nodes = tree_nodes
        self._accounts = accounts or Accounts()
        self._forecast = Forecast()
        self._arrivals = 0
        self._preemptions = 0

    @property
    def num_available(self) -> int:
        """Slots that are free or kept only in case that a text comes again."""
        return self._slots.num_free + self._cache.num_evictable

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait."""
        sequence.number, self._arrivals = self._arrivals, self._arrivals + 1
        self._accounts.enter(sequence.client)
        insort(self.waiting, sequence, key=_arrival)

    def schedule(self) -> Batch:
        """The next step's sequences."""
        self._note_progress()
        self._preempt_until_decoding_fits()
        started = self._admit()
        decoding = [Scheduled.of(sequence, 1) for sequence in self.running if not sequence.is_reading]
        chunks = self._chunks([sequence for sequence in self.running if sequence.is_reading], len(decoding))
        batch = Batch(decoding + chunks, started)
        self._clear_slots(batch.num_extend_rows + len(decoding) * self._tree_nodes)
        return batch

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out for good, whether waiting or running, and free its slots."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self._accounts.settle(sequence)
            self._forecast.ended(sequence)
            self._stop(sequence)
        self._accounts.leave(sequence.client)

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to where it stood among those that wait."""
        self._accounts.settle(sequence)
        self._stop(sequence)
        sequence.num_computed = 0
        sequence.preemptions += 1
        self._preemptions += 1
        insort(self.waiting, sequence, key=_arrival)

    def take_preemptions(self) -> int:
        """Preemptions since the last call."""
        count, self._preemptions = self._preemptions, 0
        return count

    def forget_texts(self) -> None:
        """Give up all texts that nobody runs: somebody else has written into the slots."""
        self._slots.free(self._cache.evict(self._cache.num_evictable))

    def held_slots(self) -> Tensor:
        """Slots of the cache and of running sequences, each one once (for conservation checks). # -> [held] int64"""
        return torch.cat([self._cache.held(), *map(self._own_slots, self.running)])

    def _own_slots(self, sequence: Sequence) -> Tensor:
        """Of a running sequence, those that are not the cache's. # -> [positions] int64"""
        return self._table.slots[sequence.table_row, sequence.num_shared : sequence.num_computed]

    def _note_progress(self) -> None:
        """Book what the last step served, and share prompts that have just been read."""
        for sequence in self.running:
            self._accounts.settle(sequence)
            if sequence.lease is not None and not sequence.is_reading and not sequence.lease.is_published:
                self._cache.publish(sequence.lease, sequence.tokens, self._own_slots(sequence))
                sequence.lease.is_published = True

    def _preempt_until_decoding_fits(self) -> None:
        """Every decoding sequence needs one slot now; one can always be served, because start-up checked that the
        pool holds the longest sequence."""
        while sum(not sequence.is_reading for sequence in self.running) > self.num_available or (
            len(self.running) > 1 and self.num_available == 0
        ):
            victim = cheapest(self.running, self.running, self._cache)
            assert victim is not None, "the pool does not hold the longest sequence"
            self.preempt(victim)

    def _stop(self, sequence: Sequence) -> None:
        self._released(sequence)
        self.running.remove(sequence)
        assert sequence.lease is not None, "a running sequence has a lease"
        slots = self._table.release_row(sequence.table_row, sequence.num_computed)
        unused = self._cache.release(sequence.lease, sequence.tokens, slots[sequence.num_shared :])
        self._slots.free(unused)
        sequence.row = sequence.lease = None

    def _admit(self) -> list[Sequence]:
        """Start waiting sequences, those of the client served least first, while there is room."""
        started: list[Sequence] = []
        while (sequence := self._next_to_start()) is not None:
            if not self._has_room(sequence) and not self._make_way(sequence, started):
                break
            self._start(sequence)
            started.append(sequence)
        return started

    def _next_to_start(self) -> Sequence | None:
        """Nobody overtakes one that does not fit, but one whose prefix is just being read does not stand in the way."""
        lines: dict[str, list[Sequence]] = {}
        for sequence in self.waiting:
            lines.setdefault(sequence.client, []).append(sequence)
        served = {client: self._accounts.served(client) for client in lines}
        for sequence in self.running:
            if sequence.client in served:
                served[sequence.client] += self._forecast.claim(sequence)
        for client in sorted(lines, key=served.__getitem__):
            for sequence in sorted(lines[client], key=lambda sequence: sequence.request.priority):
                if not self._is_being_read(sequence):
                    return sequence
        return None

    def _is_being_read(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to share much of this one's text."""
        return any(
            self._cache.worth_waiting(sequence.cache_namespace, sequence.tokens, other.cache_namespace, other.tokens)
            for other in self.running
            if other.is_reading
        )

    def _has_room(self, sequence: Sequence, victims: Items[Sequence] = ()) -> bool:
        """Whether there is a line of the table, and slots for what it and those that run will probably need, once
        `victims` have been preempted."""
        others = [other for other in self.running if other not in victims]
        if not others:
            return True
        claimed = sum(self._forecast.claim(other) for other in others) + self._tree_nodes
        claimed += self._forecast.claim(sequence)
        claimed -= self._cache.leased(sequence.cache_namespace, sequence.tokens, besides=_leases(victims))
        available = self.num_available + _freed_by(victims, self._cache)
        return self._table.num_free_rows + len(victims) > 0 and claimed <= available

    def _make_way(self, sequence: Sequence, started: Items[Sequence]) -> bool:
        """For a client that runs nothing, preempt sequences of clients that run more than one, the cheapest first; none
        of them unless there is room then. Returns whether there is."""
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
        self._accounts.waive(sequence)
        self.running.append(sequence)

    def _chunks(self, reading: Items[Sequence], num_decoding: int) -> list[Scheduled]:
        """Share out one chunk of prompt rows among those that are still reading, the client served least first."""
        left = min(self._prefill_chunk, self.num_available - num_decoding)
        chunks = []
        for sequence in sorted(reading, key=lambda sequence: self._accounts.served(sequence.client)):
            num_rows = min(sequence.num_pending, left)
            if num_rows > 0:
                chunks.append(Scheduled.of(sequence, num_rows))
                left -= num_rows
        return chunks

    def _clear_slots(self, wanted: int) -> None:
        """Evict until so many slots are free, or nothing is left to evict."""
        if wanted > self._slots.num_free:
            self._slots.free(self._cache.evict(max(wanted - self._slots.num_free, _EVICT_AT_ONCE)))


class Forecast:
    """How many slots a sequence will need before it ends: what it still has to read, and what it will probably write,
    for answers are as long as the recent ones were."""

    def __init__(self) -> None:
        self._mean_tokens = _FIRST_GUESS

    def ended(self, sequence: Sequence) -> None:
        self._mean_tokens += _RATE * (sequence.num_generated - self._mean_tokens)

    def claim(self, sequence: Sequence) -> int:
        """Slots that a sequence will still ask for; an answer beyond the mean length will go on for a part of it."""
        expected = max(self._mean_tokens - sequence.num_generated, _NEVER_LESS * self._mean_tokens)
        return sequence.num_pending + min(sequence.num_remaining, round(expected))


def _arrival(sequence: Sequence) -> int:
    return sequence.number


def cheapest(candidates: Items[Sequence], running: Items[Sequence], cache: PrefixCache) -> Sequence | None:
    """Least important, not preempted often, least to compute again, newest: in this order. None if all are spared.

    The one that has been here longest never gives way, so everyone's turn to get on comes.
    """
    oldest = min(running, key=_arrival)
    return min(
        (sequence for sequence in candidates if sequence is not oldest),
        key=lambda sequence: (
            -sequence.request.priority,
            sequence.preemptions >= _OFTEN,
            _freed_by([sequence], cache),
            -sequence.number,
        ),
        default=None,
    )


def _freed_by(victims: Items[Sequence], cache: PrefixCache) -> int:
    """Slots that no other sequence holds, which are free or evictable once all of these are preempted: positions that
    may have to be computed again."""
    own = sum(victim.num_computed - victim.num_shared for victim in victims)
    return own + cache.held_only_by(_leases(victims))


def _leases(sequences: Items[Sequence]) -> list[Lease]:
    return [sequence.lease for sequence in sequences if sequence.lease is not None]
