"""The prefix cache: what it hands out belongs to the text, what is leased stays, and every slot has one owner."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from service.engine.kv_pool import SlotPool
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


@dataclass
class Running:
    """A text in the making: which slot holds which of its positions."""

    lease: PrefixLease
    tokens: list[int]
    own: list[int]  # behind the lease


class World:
    """Texts that come, grow and go, and what every slot holds: the oracle is the text itself."""

    def __init__(self) -> None:
        self.pool, self.cache = SlotPool(40, CPU), PrefixCache(CPU)
        self.running: list[Running] = []
        self.holds: dict[int, tuple[int, ...]] = {}  # tokens up to the one behind the slot's position

    def begin(self, tokens: list[int]) -> None:
        lease = self.cache.acquire("", tokens)
        assert len(set(lease.slots.tolist())) == lease.length
        for position, slot in enumerate(lease.slots.tolist()):
            assert self.holds[slot] == tuple(tokens[: position + 2])
        assert lease.length < len(tokens)
        self.running.append(Running(lease, list(tokens), []))

    def grow(self, text: Running, count: int, token: int) -> None:
        count = min(count, self.pool.num_free)
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
        self.pool.free(self.cache.release(text.lease, text.tokens, slots(*text.own)))

    def evict(self, count: int) -> None:
        possible = self.cache.num_evictable
        given = self.cache.evict(count)
        assert given.shape[0] == min(count, possible)
        self.pool.free(given)

    def _write(self, text: Running) -> None:
        for place, slot in enumerate(text.own):
            self.holds[slot] = tuple(text.tokens[: text.lease.length + place + 2])

    def check(self) -> None:
        own = [slot for text in self.running for slot in text.own]
        held = self.cache.held().tolist()
        assert sorted([*own, *held, *self.pool.free_slots().tolist()]) == list(range(1, 40))
        assert self.cache.num_evictable == len(held) - len(self.leased())
        assert self.leased() <= set(held)

    def leased(self) -> set[int]:
        return {slot for text in self.running for node in text.lease.node.upwards() for slot in node.slots.tolist()}


MOVES = st.tuples(st.integers(0, 4), st.integers(0, 7), st.integers(1, 9), st.lists(st.integers(0, 1), max_size=7))


@given(st.lists(MOVES, max_size=60))
def test_any_order_of_events_keeps_every_slot_once_and_every_text_right(
    moves: Iterable[tuple[int, int, int, list[int]]],
) -> None:
    world = World()
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
        else:
            world.evict(count)
        world.check()
    for text in list(world.running):
        world.end(text)
    world.evict(100)
    assert world.pool.num_free == world.pool.capacity
    assert world.cache._roots == {}
