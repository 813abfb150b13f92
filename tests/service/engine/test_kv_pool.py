"""The pool of keys and values, and how many slots fit into memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.engine.kv_pool import KVPool, KVShape, SlotPool

CPU = torch.device("cpu")


def test_users_of_overlapping_slots_find_nothing_they_left() -> None:
    pool, one, other, third = KVPool(KVShape(3, 2, 4, torch.float32), 10, CPU), object(), object(), object()
    whole, low, high = range(1, 10), range(1, 5), range(5, 10)
    assert pool.use(one, whole)
    assert not pool.use(one, whole)
    assert pool.use(other, low)
    assert pool.use(third, high)
    assert not pool.use(other, low)
    assert pool.use(one, whole)
    assert pool.use(other, low)
    assert pool.use(third, high)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_every_slot_has_one_owner(moves: list[tuple[bool, int]]) -> None:
    pool, held = SlotPool(33, CPU), torch.empty(0, dtype=torch.int64)
    for take, count in moves:
        if take:
            held = torch.cat([held, pool.allocate(min(count, pool.num_free))])
        else:
            pool.free(held[:count])
            held = held[count:]
        owned = torch.cat([held, pool.free_slots()])
        assert sorted(owned.tolist()) == list(range(1, 33))
        assert pool.num_free == 32 - len(held)


def test_freeing_twice_is_noticed() -> None:
    pool = SlotPool(4, CPU)
    slots = pool.allocate(2)
    pool.free(slots)
    with pytest.raises((AssertionError, RuntimeError)):
        pool.free(slots)


def test_pools_of_disjoint_slots() -> None:
    first, second = SlotPool(4, CPU), SlotPool(4, CPU, first=4)
    assert sorted(first.allocate(3).tolist()) == list(first.owned) == [1, 2, 3]
    assert sorted(second.allocate(3).tolist()) == list(second.owned) == [4, 5, 6]
