"""Slots and the table: nothing is lost, nothing has two owners, and misuse is noticed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.tree_attention import NULL_SLOT
from service.engine.slots import SlotPool, SlotTable

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


def test_the_null_slot_is_never_handed_out() -> None:
    pool = SlotPool(8, CPU)
    assert pool.capacity == 7
    assert NULL_SLOT not in pool.allocate(7).tolist()


def test_more_than_there_is_cannot_be_had() -> None:
    pool = SlotPool(4, CPU)
    with pytest.raises(AssertionError, match="4 slots asked for, 3 free"):
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
    table.write(torch.tensor([row] * 3), torch.tensor([0, 1, 2]), torch.tensor([5, 6, 4]))
    table.write(torch.tensor([other]), torch.tensor([0]), torch.tensor([9]))
    assert table.used([(row, 3), (other, 1)]).tolist() == [5, 6, 4, 9]
    assert table.release_row(row, 3).tolist() == [5, 6, 4]
    assert (table.slots[row] == NULL_SLOT).all()
    assert table.take_row() == row


def test_nobody_uses_nothing() -> None:
    assert SlotTable(2, 10, CPU).used([]).tolist() == []


def test_pools_of_disjoint_slots() -> None:
    first, second = SlotPool(4, CPU), SlotPool(4, CPU, first=4)
    assert sorted(first.allocate(3).tolist()) == list(first.mine) == [1, 2, 3]
    assert sorted(second.allocate(3).tolist()) == list(second.mine) == [4, 5, 6]
