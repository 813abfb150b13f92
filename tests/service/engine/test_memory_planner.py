"""Sharing out device memory, and what is reported when there is too little of it."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptation.checkpoint import SnapshotRing
from adaptation.config import Tuning
from adaptation.evaluator import untrained_rows
from adaptation.trainer import OnlineTrainer, Rules
from adaptation.weights import DrafterWeights, in_place
from drafters.network.checkpoint import weights_of
from drafters.network.pool import EntryPool
from drafters.network.recording import FeedbackRecorder
from drafters.training.initialise import InputSums, sums_bytes
from drafters.tree import MAX_NODES
from service.config import GIB
from service.engine.engine import EngineLimits
from service.engine.kv_pool import KVPool, KVShape, LayerKV, SlotPool
from service.engine.memory_planner import (
    KVRoom,
    LearningSizes,
    MemoryPlan,
    Need,
    entry_bytes,
    feedback_bytes,
    memory_for,
    needs_of,
    room_for,
    target_without_room,
    training_bytes,
)
from service.errors import StartupError
from tests.drafters.network.parts import serving, tiny_drafter, tiny_embedding
from tests.tiny_models import VOCAB_SIZE, loaded_tiny

KV_SHAPE = KVShape((LayerKV(kv_heads=2, dim=4),) * 3, torch.float32)
LIMITS = EngineLimits(max_model_len=400, max_sequences=4, prefill_chunk=64, max_budget=8)


def test_what_is_left_is_what_no_one_needs() -> None:
    plan = MemoryPlan(10 * GIB, (Need("this", 3 * GIB, "lower a"), Need("that", 2 * GIB, "lower b")))
    assert plan.left_bytes == 5 * GIB
    assert plan.described() == "3.00 GiB for this, 2.00 GiB for that"


def test_too_little_names_what_to_lower() -> None:
    plan = MemoryPlan(4 * GIB, (Need("this", 3 * GIB, "lower a"), Need("that", 2 * GIB, "lower b")))
    with pytest.raises(StartupError, match=r"4\.00 GiB .* are free .*: lower a$"):
        _ = plan.left_bytes


def test_more_than_is_left_is_refused() -> None:
    plan = MemoryPlan(5 * GIB, (Need("this", 3 * GIB, "lower a"),))
    plan.check(2 * GIB)
    with pytest.raises(StartupError, match=r"2\.00 GiB .* are left after 3\.00 GiB for this: lower kv_cache$"):
        plan.check(2 * GIB + 1)


def test_a_refusal_of_the_device_names_what_to_lower() -> None:
    with (
        pytest.raises(StartupError, match=r"no memory left for the pool: lower kv_cache$"),
        memory_for("the pool", "lower kv_cache"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _numbers(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def test_what_training_holds_is_what_was_foreseen(tmp_path: Path) -> None:
    served = tiny_drafter().to(torch.bfloat16)
    weights = DrafterWeights(
        weights_of(served),
        served.config,
        prepare=in_place(served),
        snapshots=SnapshotRing(tmp_path, size=8),
        train_device="cpu",
    )
    rules = Rules(relative=False, blocks=2, learning_rate=1e-3, anchor_weight=0.0, autocast=False, tuning=Tuning())
    embed = tiny_embedding(served.config.hidden_size)
    rows = untrained_rows(weights.anchor, None)
    trainer = OnlineTrainer(weights.training, weights.anchor, embed, rows, rules=rules, seed=0)
    state = {name: value for name, value in trainer.tensors().items() if not name.endswith(("step", "d2t"))}
    served_too = _numbers(weights._served.weights.values())
    lasting = [*state.values(), *weights.anchor.parameters(), *weights.unchanged().parameters(), *served_too]
    count = sum(v.numel() for v in served.parameters())
    serving = total_bytes(served.parameters())
    gradients, undo, on_the_way = 4 * count, 4 * count + 8 * count, 3 * serving
    assert total_bytes(lasting) + gradients + undo + on_the_way == training_bytes(count, serving)


def test_feedback_tables_are_as_large_as_foreseen() -> None:
    config = tiny_drafter().config
    sizes: dict[str, Any] = {"max_sequences": 3, "top": 5}
    tables = FeedbackRecorder(config, torch.arange(4), window_tokens=40, **sizes, dtype=torch.bfloat16)
    _, features, labels, *memory = tables._tables
    held = [features, *labels.fields, *memory]
    sizes |= {"width": config.features_size, "hidden": config.hidden_size, "places": held[0].shape[1]}
    assert total_bytes(held) == feedback_bytes(itemsize=2, **sizes)


def test_every_need_is_named_once_with_a_remedy() -> None:
    target = target_without_room(loaded_tiny("llama"), LIMITS, (0, 2))
    learning = LearningSizes(trains_here=True, window_tokens=32, top=8, kept_texts=5)
    needs = needs_of(target, LIMITS, serving(tiny_drafter()), learning, captures=True)
    assert len({need.what for need in needs}) == len(needs)
    assert needs[1].num_bytes == 4 * 9 * VOCAB_SIZE * 16
    assert all(need.lower for need in needs)
    elsewhere = needs_of(target, LIMITS, serving(tiny_drafter()), LearningSizes(False, 32, 8, 5), captures=False)
    recorded = [next(need.num_bytes for need in every if "recorded" in need.what) for every in (needs, elsewhere)]
    assert recorded[0] * LIMITS.max_sequences == recorded[1] * (LIMITS.max_sequences + 5)
    assert {need.what for need in needs} - {need.what for need in elsewhere} == {
        "captured forwards",
        "the drafter's captured forwards",
        "training",
    }


def test_a_drafter_takes_its_own_share_of_a_slot() -> None:
    network = serving(tiny_drafter(prefix_entries="all"))
    pools = [EntryPool(network, slots) for slots in (3, 4)]
    expected = pools[1].storage.nbytes - pools[0].storage.nbytes
    assert (entry_bytes(network), entry_bytes(None)) == (expected, 0)


@pytest.mark.parametrize("spare", [0, 1, 1000])
def test_memory_becomes_slots(spare: int) -> None:
    needed = LIMITS.max_model_len + MAX_NODES + 1
    pool_bytes = (needed + spare) * KV_SHAPE.bytes_per_slot + KV_SHAPE.bytes_per_slot - 1
    assert room_for(KV_SHAPE, pool_bytes, LIMITS) == KVRoom(needed + spare)


GEMMA_3_12B = KVShape(tuple(LayerKV(8, 256, 1024 if number % 6 < 5 else None) for number in range(48)), torch.bfloat16)


def test_layers_with_a_window_take_a_quarter_of_the_memory() -> None:
    """Gemma 3 12B, one text of 32k tokens."""
    limits = EngineLimits(max_model_len=32768, max_sequences=1, prefill_chunk=256, max_budget=64)
    needed = limits.max_model_len + MAX_NODES + 1
    room = room_for(GEMMA_3_12B, needed * GEMMA_3_12B.bytes_per_slot // 4, limits)
    assert room.num_slots >= needed
    assert room.num_places is not None
    assert room.num_places >= 1024 + 256 + 64 + 1 + needed // 24
    assert room.described == f"{room.num_slots - 1} tokens ({room.num_places - 1} in layers with a window)"


@pytest.mark.parametrize("share", [0, None])
@pytest.mark.parametrize("gigabytes", [1, 8, 40])
@pytest.mark.parametrize("max_sequences", [1, 32, 256])
def test_slots_and_places_take_no_more_than_there_is(share: int | None, gigabytes: int, max_sequences: int) -> None:
    """With a layer in six that keeps all, and with none."""
    shape = replace(GEMMA_3_12B, layers=(LayerKV(8, 256, 1024),) * 48)
    shape = shape if share == 0 else GEMMA_3_12B
    limits = EngineLimits(max_model_len=2048, max_sequences=max_sequences, prefill_chunk=256, max_budget=64)
    room, full = room_for(shape, gigabytes * GIB, limits), gigabytes * GIB // shape.bytes_per_slot
    assert room.num_places is not None
    assert 1024 + MAX_NODES + 1 <= room.num_places <= room.num_slots
    beside = shape.bytes_per_slot - shape.bytes_in_windows
    assert room.num_slots * (beside + 24) + room.num_places * shape.bytes_in_windows <= gigabytes * GIB
    assert room.num_slots >= full * 0.99, "never fewer than with all layers alike"


def test_windows_that_no_text_exceeds_keep_everything() -> None:
    limits = EngineLimits(max_model_len=1024, max_sequences=4, prefill_chunk=256, max_budget=64)
    assert room_for(GEMMA_3_12B, GIB, limits) == KVRoom(GIB // GEMMA_3_12B.bytes_per_slot)


def test_too_little_memory_names_what_would_do() -> None:
    big, long = KVShape((LayerKV(kv_heads=8, dim=128),) * 30, torch.float32), replace(LIMITS, max_model_len=8192)
    with pytest.raises(StartupError, match="kv_cache to at least") as caught:
        room_for(big, GIB, long)
    enough = float(str(caught.value).split("at least ")[1].split("GiB")[0])
    assert room_for(big, int((enough + 0.01) * GIB), long).num_slots >= 8192 + MAX_NODES + 1


def test_what_a_drafter_is_made_of_is_as_large_as_foreseen() -> None:
    target, network = target_without_room(loaded_tiny("llama"), LIMITS, (0, 2)), serving(tiny_drafter())
    learning = LearningSizes(trains_here=True, window_tokens=32, top=8, kept_texts=5, makes=True)
    making = needs_of(target, LIMITS, network, learning, captures=False)[-1]
    lasting, solving = sums_bytes(network.config)
    assert total_bytes(InputSums(network.config, "cpu").tensors().values()) == lasting
    assert (making.what, making.num_bytes) == ("making a drafter", lasting + solving)
    wide = replace(network.config, target={**network.config.target, "hidden_size": 4096})
    assert [round(number / 1e9, 1) for number in sums_bytes(wide)] == [2.7, 5.4]


# The pool of keys and values, and how many slots fit into memory.

CPU = torch.device("cpu")


def test_users_of_overlapping_slots_find_nothing_they_left() -> None:
    pool, one, other, third = KVPool(KV_SHAPE, 10, CPU), object(), object(), object()
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
