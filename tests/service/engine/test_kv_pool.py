"""The pool of keys and values, and how many slots fit into memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.tree_attention import NULL_SLOT
from service.engine.kv_pool import KVPool, KVShape, SlotPool, SlotTable
from service.errors import StartupError

SHAPE = KVShape(num_layers=3, kv_heads=2, head_dim=4, dtype=torch.float32)
CPU = torch.device("cpu")


def test_written_rows_stand_in_their_slots_and_nowhere_else() -> None:
    pool = KVPool(SHAPE, 10, CPU)
    keys, values = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    pool.write(1, torch.tensor([7, 2, 5]), keys, values)
    assert torch.equal(pool.layer(1)[0, [7, 2, 5]], keys)
    assert torch.equal(pool.layer(1)[1, [7, 2, 5]], values)
    assert pool.storage.count_nonzero() == 2 * keys.numel()


def test_other_shapes_are_refused() -> None:
    pool = KVPool(SHAPE, 4, CPU)
    pool.refuse_other_shape(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    with pytest.raises(StartupError, match="heads by dimensions"):
        pool.refuse_other_shape(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 3))


def test_users_of_overlapping_slots_find_nothing_they_left() -> None:
    pool, one, other, third = KVPool(SHAPE, 10, CPU), object(), object(), object()
    whole, low, high = range(1, 10), range(1, 5), range(5, 10)
    assert pool.use(one, whole)
    assert not pool.use(one, whole)
    assert pool.use(other, low)
    assert pool.use(third, high)
    assert not pool.use(other, low)
    assert pool.use(one, whole)
    assert pool.use(other, low)
    assert pool.use(third, high)


CPU = torch.device("cpu")


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


def test_more_than_there_is_cannot_be_had() -> None:
    pool = SlotPool(4, CPU)
    with pytest.raises(AssertionError, match="4 slots requested, 3 free"):
        pool.allocate(4)


def test_freeing_twice_is_noticed() -> None:
    pool = SlotPool(4, CPU)
    slots = pool.allocate(2)
    pool.free(slots)
    with pytest.raises((AssertionError, RuntimeError)):
        pool.free(slots)


def test_allocated_slots_do_not_change_when_others_are_freed() -> None:
    pool = SlotPool(8, CPU)
    first, second = pool.allocate(3), pool.allocate(3)
    kept = second.tolist()
    pool.free(first)
    pool.allocate(3)
    assert second.tolist() == kept


def test_a_line_remembers_slots_until_it_is_released() -> None:
    table = SlotTable(2, 10, CPU)
    row, other = table.take_row(), table.take_row()
    assert table.num_free_rows == 0
    table.slots[row, :3] = torch.tensor([5, 6, 4])
    table.slots[other, 0] = 9
    assert table.release_row(row, 3).tolist() == [5, 6, 4]
    assert (table.slots[row] == NULL_SLOT).all()
    assert table.take_row() == row


def test_pools_of_disjoint_slots() -> None:
    first, second = SlotPool(4, CPU), SlotPool(4, CPU, first=4)
    assert sorted(first.allocate(3).tolist()) == list(first.owned) == [1, 2, 3]
    assert sorted(second.allocate(3).tolist()) == list(second.owned) == [4, 5, 6]
