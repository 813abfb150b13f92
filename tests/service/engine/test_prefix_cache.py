"""The prefix cache: what it hands out belongs to the text, what is leased stays, and every slot has one owner."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.engine.kv_pool import KVPool, KVShape, LayerKV, SlotPool, Windows
from service.engine.prefix_cache import PrefixCache, PrefixLease

CPU = torch.device("cpu")
HELLO = [7, 1, 2, 3, 4, 5, 6]


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def kept(cache: PrefixCache, tokens: list[int], first_slot: int, namespace: str = "") -> PrefixLease:
    """Let a text come and go; its positions lie in slots from `first_slot` on. Returns the lease it had."""
    lease = cache.acquire(namespace, tokens)
    own = torch.arange(first_slot + lease.length, first_slot + len(tokens) - 1)
    assert cache.release(lease, tokens, own).tolist() == []
    return lease


def found(cache: PrefixCache, tokens: list[int], namespace: str = "") -> list[int]:
    """Slots that a text would begin with; nothing is leased afterwards."""
    lease = cache.acquire(namespace, tokens)
    assert cache.release(lease, tokens, slots()).tolist() == []
    assert cache.known(namespace, tokens) == lease.length
    return lease.slots.tolist()


def test_a_position_whose_next_token_differs_is_read_again() -> None:
    """A drafter's entry of a position depends on the token behind it."""
    cache = PrefixCache(CPU)
    kept(cache, HELLO, 10)
    assert found(cache, [7, 1, 2, 99]) == [10, 11]
    other = [7, 1, 2, 99, 98]
    kept(cache, other, 20)
    assert found(cache, other) == [10, 11, 22, 23]
    assert found(cache, HELLO) == [10, 11, 12, 13, 14, 15]


def test_what_a_running_one_has_read_is_shared() -> None:
    cache = PrefixCache(CPU)
    lease = cache.acquire("", HELLO)
    cache.publish(lease, HELLO, slots(10, 11, 12, 13))
    assert lease.length == 4
    assert cache.num_evictable == 0
    assert found(cache, HELLO) == [10, 11, 12, 13]
    assert cache.evict(9).tolist() == []
    assert cache.release(lease, HELLO, slots(14, 15)).tolist() == []
    assert found(cache, HELLO) == [10, 11, 12, 13, 14, 15]
    assert cache.num_evictable == 6


def test_leased_slots_are_not_evicted() -> None:
    cache = PrefixCache(CPU)
    kept(cache, HELLO, 10)
    lease = cache.acquire("", HELLO[:4])
    assert cache.num_evictable == 3
    assert sorted(cache.evict(100).tolist()) == [13, 14, 15]
    assert cache.leased("", HELLO) == 3
    assert cache.held_only_by([lease]) == 3
    assert (cache.leased("", HELLO, excluding=[lease]), cache.held_only_by([])) == (0, 0)
    other = cache.acquire("", HELLO[:3])
    assert (cache.held_only_by([lease]), cache.held_only_by([other]), cache.held_only_by([lease, other])) == (1, 0, 3)
    assert (cache.leased("", HELLO, excluding=[lease]), cache.leased("", HELLO, excluding=[lease, other])) == (2, 0)
    for held in (lease, other):
        cache.release(held, HELLO[:3], slots())
    assert sorted(cache.evict(100).tolist()) == [10, 11, 12]
    assert found(cache, HELLO) == []
    assert cache.held().tolist() == []


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    cache = PrefixCache(CPU)
    texts = {first: [first, 1, 2, 3, 4] for first in (100, 200, 300)}
    for first, text in texts.items():
        kept(cache, text, first)
    found(cache, texts[100])
    assert cache.evict(1).tolist() == [203]
    assert cache.evict(2).tolist() == [201, 202]
    assert sorted(cache.evict(3).tolist()) == [200, 302, 303]
    assert found(cache, texts[300]) == [300, 301]
    assert found(cache, texts[100]) == [100, 101, 102, 103]


def test_a_shared_beginning_outlives_its_ends() -> None:
    cache = PrefixCache(CPU)
    kept(cache, [7, 1, 2, 3, 10, 11], 10)
    kept(cache, [7, 1, 2, 3, 20, 21], 30)
    assert sorted(cache.evict(4).tolist()) == [13, 14, 33, 34]
    assert found(cache, [7, 1, 2, 3, 10, 11]) == [10, 11, 12]


def test_waiting_pays_for_much_that_is_about_to_be_read() -> None:
    cache = PrefixCache(CPU)
    text = list(range(200))
    ask = [*range(150), 500, 501]
    assert cache.worth_waiting_for("a", ask) == 65
    assert cache.worth_waiting_for("a", [*range(64)]) is None
    kept(cache, text[:80], 1000, "a")
    assert cache.worth_waiting_for("a", ask) == 79 + 65
    assert cache.worth_waiting_for("b", ask) == 65
    kept(cache, text[:120], 1000, "a")
    assert cache.worth_waiting_for("a", ask) is None


def test_the_null_cache_keeps_nothing() -> None:
    cache = PrefixCache(CPU, keep=False)
    lease = cache.acquire("", HELLO)
    cache.publish(lease, HELLO, slots(1, 2, 3))
    assert (lease.length, lease.slots.tolist()) == (0, [])
    assert cache.release(lease, HELLO, slots(1, 2, 3)).tolist() == [1, 2, 3]
    assert (cache.known("", HELLO), cache.leased("", HELLO), cache.held_only_by([lease])) == (0, 0, 0)
    assert cache.evict(3).tolist() == cache.held().tolist() == []
    assert cache.worth_waiting_for("", list(range(200))) is None


# In layers with a window, slots lose their places when no window reaches them any more.


def with_places(window: int, num_slots: int = 100, num_places: int = 60) -> tuple[SlotPool, PrefixCache, Windows]:
    shape = KVShape((LayerKV(1, 1, window),), torch.float32)
    pool = KVPool(shape, num_slots, CPU, num_places=num_places).allocator()
    assert pool.windows is not None
    return pool, PrefixCache(CPU, windows=pool.windows), pool.windows


def told(pool: SlotPool, cache: PrefixCache, tokens: list[int], *, passes: bool = False) -> PrefixLease:
    """Let a text come and go, whose positions may have lost the places that it does not see. Returns its lease."""
    lease = cache.acquire("", tokens)
    own = pool.allocate(len(tokens) - 1 - lease.length)
    if passes:
        row = torch.cat([torch.zeros(lease.length, dtype=torch.int64), own])
        cache.pass_unseen((lease, len(tokens) - 1, tokens, row))
    pool.free(cache.release(lease, tokens, own), placed=False)
    return lease


def placed(cache: PrefixCache) -> int:
    return len(cache.held(placed=True))


def test_the_middle_of_texts_goes_first_then_the_window_that_was_not_needed_longest() -> None:
    pool, cache, windows = with_places(window=3)
    first, second = list(range(10)), [0, *range(50, 59)]
    for text in (first, second, first):
        told(pool, cache, text)
    assert (placed(cache), windows.places.num_free) == (18, 59 - 18)
    cache.reclaim(1, [])
    cache.reclaim(6, [])
    assert (placed(cache), windows.places.num_free) == (6, 59 - 6)
    assert [cache.known("", text) for text in (first, second, first[:8])] == [9, 9, 0]
    cache.reclaim(1, [])
    assert [cache.known("", text) for text in (first, second)] == [9, 0]
    cache.reclaim(99, [])
    assert (placed(cache), windows.places.num_free, len(cache.held())) == (0, 59, 18)


def test_what_a_running_text_sees_keeps_its_places() -> None:
    pool, cache, _ = with_places(window=4)
    text = list(range(12))
    told(pool, cache, text)
    lease = cache.acquire("", text)
    cache.reclaim(99, [(lease, lease.length - 3)])
    assert placed(cache) == 3
    cache.reclaim(99, [(lease, lease.length - 1)])
    assert placed(cache) == 1
    assert cache.evict(99).tolist() == []
    assert cache.release(lease, text, slots()).tolist() == []


def test_what_is_computed_twice_gives_the_cache_the_window_where_texts_part() -> None:
    pool, cache, windows = with_places(window=3)
    shared = list(range(20))
    told(pool, cache, [*shared, 70, 71, 72, 73])
    cache.reclaim(16, [])
    lease = cache.acquire("", [*shared, 80, 81])
    assert (lease.length, lease.parting) == (0, 19)
    cache.release(lease, [], slots())
    told(pool, cache, [*shared, *range(80, 90)], passes=True)
    third = told(pool, cache, [*shared, *range(90, 95)], passes=True)
    assert third.length == 19
    assert windows.of(third.slots).tolist()[:16] == [0] * 16
    assert (windows.of(third.slots[16:]) > 0).all()
    assert windows.places.num_free == windows.places.capacity - placed(cache)


def test_a_prefix_shorter_than_the_window_needs_all_of_its_places() -> None:
    pool, cache, _ = with_places(window=8)
    told(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert cache.known("", [1, 2, 3, 4, 0]) == 3
    cache.reclaim(1, [])
    assert cache.known("", [1, 2, 3, 4, 0]) == 0
    assert cache.known("", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]) == 11


@dataclass
class Running:
    """A text in the making: which slot holds which of its positions."""

    lease: PrefixLease
    tokens: list[int]
    own: list[int]  # behind the lease


class World:
    """Texts that come, grow and go, and what every slot holds: the oracle is the text itself."""

    def __init__(self, window: int | None) -> None:
        self.window = window or 0
        if window is None:
            self.pool, self.cache = SlotPool(40, CPU), PrefixCache(CPU)
        else:
            self.pool, self.cache, _ = with_places(window, 40, 30)
        self.running: list[Running] = []
        self.holds: dict[int, tuple[int, ...]] = {}  # tokens up to the one behind the slot's position

    def begin(self, tokens: list[int]) -> None:
        lease = self.cache.acquire("", tokens)
        assert len(set(lease.slots.tolist())) == lease.length
        for position, slot in enumerate(lease.slots.tolist()):
            assert self.holds[slot] == tuple(tokens[: position + 2])
        assert lease.length < len(tokens)
        if self.pool.windows is not None:
            assert (self.pool.windows.of(lease.slots[-self.window :]) > 0).all()
        self.running.append(Running(lease, list(tokens), []))

    def grow(self, text: Running, count: int, token: int) -> None:
        count = min(count, self.pool.room)
        for slot in self.pool.allocate(count).tolist():
            text.own.append(slot)
            if len(text.tokens) <= text.lease.length + len(text.own):
                text.tokens.append(token)

    def publish(self, text: Running) -> None:
        before = text.lease.length
        self._write(text)
        self.cache.publish(text.lease, text.tokens, slots(*text.own))
        del text.own[: text.lease.length - before]

    def end(self, text: Running) -> None:
        self._write(text)
        self.running.remove(text)
        self.pool.free(self.cache.release(text.lease, text.tokens, slots(*text.own)), placed=False)

    def take_places(self, text: Running, count: int) -> None:
        """Take places of one text's own slots, then of the cache's; but none that a text sees."""
        first = {one.lease: max(0, one.lease.length + len(one.own) - self.window + 1) for one in self.running}
        row = slots(*[0] * text.lease.length, *text.own)
        for parting in (text.lease.parting, 0 if count == 1 else text.lease.parting):
            text.lease.parting = min(text.lease.parting, parting)
            self.cache.pass_unseen((text.lease, text.lease.length + len(text.own), text.tokens, row))
            self.cache.reclaim(count, [*first.items()])
        if self.pool.windows is not None:
            for one in self.running:
                seen = torch.cat([*[node.slots for node in one.lease.node.upwards()][::-1], slots(*one.own)])
                assert (self.pool.windows.of(seen[first[one.lease] :]) > 0).all()

    def evict(self, count: int) -> None:
        possible = self.cache.num_evictable
        given = self.cache.evict(count)
        assert given.shape[0] == min(count, possible)
        self.pool.free(given, placed=False)

    def _write(self, text: Running) -> None:
        for place, slot in enumerate(text.own):
            self.holds[slot] = tuple(text.tokens[: text.lease.length + place + 2])

    def check(self) -> None:
        own = [slot for text in self.running for slot in text.own]
        held = self.cache.held().tolist()
        assert sorted([*own, *held, *self.pool.free_slots().tolist()]) == list(range(1, 40))
        assert self.cache.num_evictable == len(held) - len(self.leased())
        assert self.leased() <= set(held)
        if (windows := self.pool.windows) is not None:
            ours = [slots(*text.own[one.placed_from - one.length :]) for text in self.running if (one := text.lease)]
            there = torch.cat([*ours, self.cache.held(placed=True)])
            places = [*windows.of(there).tolist(), *windows.places.free_slots().tolist()]
            assert sorted(places) == list(range(1, 30))
            assert windows.of(slots(*own, *held)).count_nonzero() == len(there)

    def leased(self) -> set[int]:
        return {slot for text in self.running for node in text.lease.node.upwards() for slot in node.slots.tolist()}


MOVES = st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(1, 9), st.lists(st.integers(0, 1), max_size=7))


@pytest.mark.parametrize("window", [None, 1, 3])
@given(moves=st.lists(MOVES, max_size=60))
def test_any_order_of_events_keeps_every_slot_once_and_every_text_right(
    window: int | None, moves: Iterable[tuple[int, int, int, list[int]]]
) -> None:
    world = World(window)
    for kind, which, count, tokens in moves:
        text = world.running[which % len(world.running)] if world.running else None
        if kind == 0 or text is None:
            world.begin([0, *tokens])
        elif kind == 1:
            world.grow(text, count, which % 2)
        elif kind == 2:
            world.publish(text)
        elif kind == 3:
            world.end(text)
        elif kind == 4 and window is not None:
            world.take_places(text, count)
        else:
            world.evict(count)
        world.check()
    for text in list(world.running):
        world.end(text)
    world.evict(100)
    assert world.pool.num_free == world.pool.capacity
    assert world.cache._roots == {}
