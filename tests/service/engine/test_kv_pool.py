"""The pool of keys and values, and how many slots fit into memory."""

import pytest
import torch

from service.engine.kv_pool import KVPool, KVShape
from service.errors import StartupError

SHAPE = KVShape(num_layers=3, kv_heads=2, head_dim=4, dtype=torch.float32)
CPU = torch.device("cpu")


def test_bytes_of_a_slot() -> None:
    assert SHAPE.bytes_per_slot == 3 * 2 * 2 * 4 * 4
    assert KVPool(SHAPE, 10, CPU).storage.nbytes == (10 + 1) * SHAPE.bytes_per_slot


def test_written_rows_stand_in_their_slots_and_nowhere_else() -> None:
    pool = KVPool(SHAPE, 10, CPU)
    keys, values = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    pool.write(1, pool.places(torch.tensor([7, 2, 5])), keys, values)
    assert torch.equal(pool.layer(1)[0, [7, 2, 5]], keys)
    assert torch.equal(pool.layer(1)[1, [7, 2, 5]], values)
    assert pool.storage.count_nonzero() == 2 * keys.numel()


def test_values_are_stored_in_the_type_of_the_pool() -> None:
    pool = KVPool(SHAPE, 4, CPU)
    keys = torch.randn(1, 2, 4, dtype=torch.bfloat16)
    pool.write(0, pool.places(torch.tensor([1])), keys, keys)
    assert torch.equal(pool.layer(0)[0, 1], keys[0].float())


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
