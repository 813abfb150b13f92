"""The scheduler: chooses the sequences of the next step, and the number of rows of each.

Decoding sequences take part in every step; prompts are computed in chunks in the same steps. The client that was served
least is admitted first, and its prompts come first. A sequence starts after its cached prefix. When slots run out, the
cache evicts its least recently used slots, then the cheapest sequence is preempted; its keys and values are recomputed
later. While other clients decode, prompts are computed at a pace that leaves those clients their share of time."""

import time
from collections import Counter
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor

from drafters.protocol import HostMetadata
from kernels.tree_attention import MAX_NODES
from service.engine.budget import DraftBudget
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.prefix_cache import PrefixCache, PrefixLease
from service.engine.prefix_tree import common_length
from service.engine.requests import Submission
from service.engine.rows import Scheduled
from service.engine.sequence import Sequence, in_cache
from service.engine.waiting import Entry, Forecast, PromptPace, Reader, ServiceCounters, WaitingQueue

_EVICT_AT_ONCE = 256
"""Minimum number of slots per eviction, so that a full cache does not evict in every step."""

_OFTEN = 2  # number of preemptions after which other sequences are preempted first


@dataclass(frozen=True)
class StepBatch:
    """The sequences of a step; decoding ones come first."""

    items: list[Scheduled]
    started: list[Sequence]  # sequences that start to run, or start again after preemption
    budget: DraftBudget | None = None  # the step's budget, in the order of `items`; None if the step has no drafts

    @cached_property
    def decoding(self) -> list[Sequence]:
        """Sequences of which only the last token is pending."""
        return [item.sequence for item in self.items if item.decodes]

    @cached_property
    def completing(self) -> list[Sequence]:
        """Sequences that choose a token: the decoding ones, and those whose prompt ends in this step."""
        return [item.sequence for item in self.items if item.completes]

    @cached_property
    def host(self) -> HostMetadata:
        """Table rows and root positions of the completing sequences, on the host."""
        roots = tuple(len(sequence.tokens) - 1 for sequence in self.completing)
        return HostMetadata(tuple(sequence.table_row for sequence in self.completing), roots)

    @cached_property
    def num_extend_rows(self) -> int:
        """Number of the step's rows without drafted nodes."""
        return sum(item.num_rows for item in self.items)


class Scheduler:
    """Admits, schedules and preempts sequences; owns the waiting queue and the running sequences, in the order in which
    they started."""

    def __init__(
        self,
        slots: SlotPool,
        table: SlotTable,
        *,
        pace: PromptPace,
        on_start: Callable[[Sequence], bool] = lambda sequence: True,
        on_stop: Callable[[Sequence], None] = lambda sequence: None,
        keeps_prefixes: bool = False,
        tree_nodes: int = MAX_NODES,
    ) -> None:
        """`on_start`: called with each sequence that is to start, or to start again; returns whether it can. `on_stop`:
        called with each sequence that finishes or is preempted, while it still has its table row. `keeps_prefixes`:
        whether prefixes stay in the cache when no sequence uses them; `tree_nodes`: nodes per decoding sequence for
        which slots are kept free of cached prefixes."""
        self.queue = WaitingQueue()
        self.running: list[Sequence] = []
        self._slots = slots
        self._table = table
        self._pace = pace
        self._hooks = on_start, on_stop
        device, windows, states = table.slots.device, slots.windows, table.states
        self._cache = PrefixCache(device, keep=keeps_prefixes, windows=windows, states=states)
        self._tree_nodes = tree_nodes
        self._service = ServiceCounters()
        self._forecast = Forecast()
        self._preemptions = 0
        self._must_preempt = False  # whether a sequence waits for room that another one must leave

    @property
    def fits_ahead(self) -> bool:
        """Whether the next step needs no preemption, and no place of a window that the last step may still free, so
        that it can be planned without the tokens of the last one."""
        decoding = sum(not sequence.is_prefilling for sequence in self.running)
        free = self._room if self._slots.windows is None else self._slots.room - self._pace.most_rows
        return not self._must_preempt and max(1, decoding) <= free

    @property
    def num_available(self) -> int:
        """Number of slots that are free, or hold cached prefixes that can be evicted."""
        return self._slots.num_free + self._cache.num_evictable

    @property
    def num_seen(self) -> int:
        """Number of places that running sequences' next rows may see in layers with a window."""
        return sum(map(self._seen_of, self.running))

    def _seen_of(self, sequence: Sequence, more: int = 0) -> int:
        """Number of these places for one sequence, when `more` of its positions are computed."""
        return 0 if self._slots.windows is None else min(self._slots.windows.size, sequence.num_computed + more)

    @property
    def _room(self) -> int:
        """Number of rows that the next step can have at most."""
        return min(self.num_available, self._slots.num_places - self.num_seen)

    def add(self, body: Submission) -> None:
        """Queue the requests of an HTTP request body."""
        present = {*self.queue.clients, *(sequence.client for sequence in self.running)}
        self._service.enter(body.requests[0].scope.account, present)
        self.queue.arrive(body)

    def schedule(self, *, ahead: bool = False) -> StepBatch:
        """Choose the next step's sequences, and free slots for them. `ahead`: whether the tokens of the last step are
        unknown; then no sequence is preempted (see `fits_ahead`)."""
        self._pace.observe(is_over=not self.running)
        self._note_progress()
        self._preempt_until_decoding_fits()
        started = self._admit(may_preempt=not ahead)
        decoding = [
            Scheduled.of(sequence, 1)
            for sequence in self.running
            if not sequence.is_prefilling and not sequence.must_end
        ]
        chunks = self._chunks(decoding)
        batch = StepBatch(decoding + chunks, started)
        self._clear_slots(batch.num_extend_rows + len(decoding) * self._tree_nodes)
        return batch

    def remove(self, sequence: Sequence) -> None:
        """Remove a running sequence and free its slots. Does nothing if the sequence does not run."""
        if sequence in self.running:
            self._forecast.observe(sequence)
            self._stop(sequence)
            sequence.has_ended = True
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the slots of a sequence that has ended, once no launched step writes to them."""
        if sequence.has_ended and sequence.row is not None and not sequence.steps_in_flight:
            self._free(sequence)

    def withdraw(self, request_ids: Collection[str]) -> list[Sequence]:
        """Remove all sequences of these requests, waiting or running. Returns those that existed already."""
        gone = [sequence for sequence in self.running if sequence.request.request_id in request_ids]
        for sequence in gone:
            self.remove(sequence)
        return gone + self.queue.remove(request_ids)

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to its place in the queue."""
        assert not sequence.steps_in_flight, "a launched step chooses its next token"
        self._stop(sequence)
        self._free(sequence)
        del sequence.sampling  # rebuilt from its tokens
        sequence.num_computed = 0
        sequence.preemptions += 1
        self._preemptions += 1
        self.queue.add(Entry(None, sequence.arrival, sequence))

    def take_preemptions(self) -> int:
        """Return the number of preemptions since the last call."""
        count, self._preemptions = self._preemptions, 0
        return count

    def forget_prefixes(self) -> None:
        """Drop all cached prefixes that no running sequence uses; to be called when their slots were overwritten."""
        self._slots.free(self._cache.evict(self._cache.num_evictable), placed=False)

    def held_slots(self, *, placed: bool = False) -> Tensor:
        """Collect the slots of the cache and of running sequences, each once, for conservation checks. `placed`: only
        those with a place in layers with a window. # -> [held] int64"""
        own = (self._own_slots(sequence, placed=placed) for sequence in self.running)
        return torch.cat([self._cache.held(placed=placed), *own])

    def held_states(self) -> list[int]:
        """List the snapshots of the cache, and those that running sequences have for it."""
        return self._cache.held_states(_leases(self.running))

    def _own_slots(self, sequence: Sequence, *, placed: bool = False) -> Tensor:
        """Slots of a running sequence that do not belong to the cache. # -> [positions] int64"""
        first = sequence.lease.placed_from if placed and sequence.lease is not None else sequence.num_shared
        return self._table.slots[sequence.table_row, first : sequence.num_computed]

    def _note_progress(self) -> None:
        """Charge clients for the last step, leave the snapshots that the prefix cache wants, and publish in it the
        prompts that are now computed, or computed up to a snapshot."""
        for sequence in self.running:
            self._service.settle(sequence)
            lease = sequence.lease
            assert lease is not None, "a running sequence has a lease"
            has_snapshot = sequence.num_computed in lease.ends
            if has_snapshot:
                self._cache.keep_state(lease, sequence.table_row)
            if not lease.is_published and (has_snapshot or not sequence.is_prefilling):
                self._cache.publish(lease, sequence.tokens, self._own_slots(sequence))
                lease.is_published = not sequence.is_prefilling
                self.queue.release(sequence)
            if lease.parting:
                self._cache.pass_unseen(in_cache(sequence, self._table))

    def _preempt_until_decoding_fits(self) -> None:
        """Preempt sequences until each decoding one has a slot. A sequence that runs alone always has one, because
        start-up checks that the pool holds the longest sequence."""
        while sum(not sequence.is_prefilling for sequence in self.running) > self._room or (
            len(self.running) > 1 and self._room == 0
        ):
            victim = cheapest(self.running, self.running, self._cache)
            assert victim is not None, "the pool does not hold the longest sequence"
            self.preempt(victim)

    def _stop(self, sequence: Sequence) -> None:
        self._service.settle(sequence)
        self._hooks[1](sequence)
        self.running.remove(sequence)
        self.queue.release(sequence)

    def _free(self, sequence: Sequence) -> None:
        assert sequence.lease is not None, "a running sequence has a lease"
        self._cache.keep_state(sequence.lease, sequence.table_row, is_last=True)
        slots = self._table.release_row(sequence.table_row, sequence.num_computed)
        unused = self._cache.release(sequence.lease, sequence.tokens, slots[sequence.num_shared :])
        self._slots.free(unused, placed=False)
        sequence.row = sequence.lease = None

    def _admit(self, *, may_preempt: bool) -> list[Sequence]:
        """Start waiting sequences while there is room, beginning with the client that was served least."""
        started: list[Sequence] = []
        self._must_preempt = False
        while (sequence := self._next_to_start()) is not None:
            if not self._has_room(sequence):
                victims = self._victims(sequence, started)
                self._must_preempt = bool(victims) and not may_preempt
                if not victims or self._must_preempt:
                    break
                for victim in victims:
                    self.preempt(victim)
            self.queue.take(sequence)
            if self._hooks[0](sequence):
                self._start(sequence)
                started.append(sequence)
        return started

    def _next_to_start(self) -> Sequence | None:
        """First waiting sequence of the client that was served least among those that may run more sequences. Sequences
        whose prefix is being computed by a running one are parked, and others overtake them; no sequence overtakes one
        that does not fit. Returns None if no sequence can start."""
        running = Counter(sequence.client for sequence in self.running)
        served = {client: self._service.served(client) for client in self.queue.ready}
        for sequence in self.running:
            if sequence.client in served:
                served[sequence.client] += self._forecast.claim(sequence)
        for client in sorted(served, key=served.__getitem__):
            while (head := self.queue.first(client)) is not None:
                most = head.request.scope.max_running
                if most is not None and running[client] >= most:
                    break
                if (computing := self._computes_its_prefix(head)) is None:
                    return head
                self.queue.park(head, computing)
                if computing.lease is not None:
                    self._cache.want_state(computing.lease, common_length(head.tokens, computing.tokens) - 1)
        return None

    def _computes_its_prefix(self, sequence: Sequence) -> Sequence | None:
        """Running sequence that is about to publish a long prefix of this sequence's prompt. Returns None if there is
        none."""
        prefilling = [
            other for other in self.running if other.is_prefilling and other.cache_namespace == sequence.cache_namespace
        ]
        if not prefilling:
            return None
        length = self._cache.worth_waiting_for(sequence.cache_namespace, sequence.tokens)
        if length is None:
            return None
        return next((other for other in prefilling if sequence.tokens[:length] == other.tokens[:length]), None)

    def _has_room(self, sequence: Sequence, victims: Items[Sequence] = ()) -> bool:
        """Whether, after preempting `victims`, a table row is free, and enough slots for the expected needs of this
        sequence and all running ones."""
        others = [other for other in self.running if other not in victims]
        if not others:
            return True
        claimed = sum(self._forecast.claim(other) for other in others) + self._tree_nodes
        claimed += self._forecast.claim(sequence)
        claimed -= self._cache.leased(sequence.cache_namespace, sequence.tokens, excluding=_leases(victims))
        available = self.num_available + _freed_by(victims, self._cache)
        seen = sum(self._seen_of(one, self._forecast.claim(one)) for one in (*others, sequence)) + self._tree_nodes
        fits = claimed <= available and seen <= self._slots.num_places
        return self._table.num_free_rows + len(victims) > 0 and fits

    def _victims(self, sequence: Sequence, started: Items[Sequence]) -> list[Sequence]:
        """Choose sequences to preempt so that there is room for one that waits: the cheapest of clients that run more
        than its own client would then run. Sequences that were preempted often are preempted only for a client that
        runs none. Returns no sequence if there would still be no room."""
        victims: list[Sequence] = []
        while not self._has_room(sequence, victims):
            running = Counter(other.client for other in self.running if other not in victims)
            spare = [
                other
                for other in self.running
                if running[other.client] > running[sequence.client] + 1
                and (other.preemptions < _OFTEN or not running[sequence.client])
                and other not in (*victims, *started)
            ]
            victim = cheapest(spare, self.running, self._cache)
            if victim is None:
                return []
            victims.append(victim)
        return victims

    def _start(self, sequence: Sequence) -> None:
        sequence.row = self._table.take_row()
        ends = sequence.request.messages_end
        sequence.lease = self._cache.acquire(sequence.cache_namespace, sequence.tokens, ends)
        sequence.num_computed = sequence.lease.length
        if sequence.started_seconds is None:
            sequence.num_cached = sequence.num_computed
            sequence.started_seconds = time.monotonic()
        self._table.slots[sequence.row, : sequence.lease.length] = sequence.lease.slots
        self._table.begin(sequence.row, sequence.lease.state, sequence.lease.length)
        self._service.waive(sequence)
        self.running.append(sequence)

    def _chunks(self, decoding: Items[Scheduled]) -> list[Scheduled]:
        """Share one chunk of prompt rows among the prefilling sequences, beginning with the client that was served
        least. While other clients decode, the prompts of a client get only as many rows as fit into its share of
        time."""
        left, paced = min(self._pace.most_rows, self._room - len(decoding)), self._pace.num_rows
        clients = {item.sequence.client for item in decoding}
        prefilling = [sequence for sequence in self.running if sequence.is_prefilling]
        chunks, beside = list[Scheduled](), dict[str, Reader]()
        for sequence in sorted(prefilling, key=lambda sequence: self._service.served(sequence.client)):
            client, others = sequence.client, len(clients - {sequence.client})
            most = 0 if self._pace.owes(client) else min(left, paced)
            num_rows = min(sequence.num_until_end, most if others else left)
            if num_rows > 0:
                chunks.append(Scheduled.of(sequence, num_rows))
                read = beside[client].num_rows if client in beside else 0
                beside[client] = Reader(read + num_rows, others)
                left, paced = left - num_rows, paced - num_rows if others else paced
        if decoding:
            self._pace.begin(beside)
        return chunks

    def _clear_slots(self, wanted: int) -> None:
        """Evict cached prefixes until `wanted` slots are free, or no evictable prefix is left, and take the places of
        positions that no running sequence sees until as many places are free."""
        if wanted > self._slots.num_free:
            evicted = self._cache.evict(max(wanted - self._slots.num_free, _EVICT_AT_ONCE))
            self._slots.free(evicted, placed=False)
        if self._slots.windows is not None and wanted > self._slots.windows.places.num_free:
            self._cache.clear_places(wanted, [in_cache(sequence, self._table) for sequence in self.running])


def cheapest(candidates: Items[Sequence], running: Items[Sequence], cache: PrefixCache) -> Sequence | None:
    """Choose the sequence to preempt by, in this order: lowest priority, not preempted often, fewest positions to
    compute again, newest. The oldest running sequence is never chosen, so that every sequence finishes in the end.
    Returns None if no candidate is left."""
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
    """Number of slots that become free or evictable when all of these sequences are preempted; as many positions may
    have to be computed again."""
    own = sum(victim.num_computed - victim.num_shared for victim in victims)
    return own + cache.held_only_by(_leases(victims))


def _leases(sequences: Items[Sequence]) -> list[PrefixLease]:
    return [sequence.lease for sequence in sequences if sequence.lease is not None]
