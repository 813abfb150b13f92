"""Who takes part in a step: first come first served, one chunk for all prompts, and the youngest gives way."""

from collections.abc import Sequence as Items

import torch

from service.engine.generation import Sequence
from service.engine.sampling import SamplingState
from service.engine.scheduler import Batch, Scheduler
from service.engine.sequence import SamplingParams
from service.engine.slots import SlotPool, SlotTable
from service.engine.text_stream import TextStream
from service.tokenizer import ChatTokenizer
from tests.service.engine.harness import greedy, request
from tests.tiny_models import VOCAB_SIZE, tiny_tokenizer

CPU = torch.device("cpu")
TOKENIZER = ChatTokenizer(tiny_tokenizer())


class Room:
    """A scheduler with its slots, and steps that commit every scheduled row and one more token."""

    def __init__(self, num_slots: int = 1000, lines: int = 4, chunk: int = 10) -> None:
        self.slots, self.table = SlotPool(num_slots + 1, CPU), SlotTable(lines, 500, CPU)
        self.scheduler = Scheduler(self.slots, self.table, prefill_chunk=chunk)

    def add(self, *lengths: int) -> list[Sequence]:
        added = [sequence_of(length) for length in lengths]
        for sequence in added:
            self.scheduler.add(sequence)
        return added

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        for item in batch.items:
            self.table.slots[item.sequence.table_row, item.chain.start : item.chain.start + item.num_rows] = (
                self.slots.allocate(item.num_rows)
            )
            item.sequence.num_computed += item.num_rows
            item.sequence.tokens += [1] if item.completes else []
        return batch

    def conserved(self) -> bool:
        held = self.table.used([(s.table_row, s.num_computed) for s in self.scheduler.running])
        return len({*held.tolist(), *self.slots.free_slots().tolist()}) == self.slots.capacity


def sequence_of(length: int, params: SamplingParams | None = None) -> Sequence:
    asked = request("r", [2] * length, params or greedy(400))
    return Sequence(
        request=asked,
        index=0,
        tokens=list(asked.prompt),
        sampling=SamplingState(asked.sampling, asked.prompt, eos_ids=frozenset(), vocab=VOCAB_SIZE, device=CPU),
        text=TextStream(TOKENIZER.detokenizer(True), stop=(), include_stop=False, min_tokens=0),
        num_prompt=length,
    )


def shares(batch: Batch) -> list[tuple[Sequence, int]]:
    return [(item.sequence, item.num_rows) for item in batch.items]


def test_sequences_start_in_the_order_they_came() -> None:
    room = Room(lines=2)
    first, second, third = room.add(5, 5, 5)
    assert room.step().started == [first, second]
    room.scheduler.remove(first)
    assert room.step().started == [third]
    assert room.scheduler.running == [second, third]


def test_a_large_one_at_the_head_is_not_overtaken() -> None:
    room = Room(num_slots=150, chunk=100)
    running, large, small = room.add(30, 90, 2)
    assert room.step().started == [running]
    assert room.step().started == []
    assert list(room.scheduler.waiting) == [large, small]


def test_one_chunk_is_shared_by_all_prompts_beside_the_decoding_rows() -> None:
    room = Room(chunk=10)
    a, b = room.add(4, 25)
    assert shares(room.step()) == [(a, 4), (b, 6)]
    assert shares(room.step()) == [(a, 1), (b, 10)]
    (c,) = room.add(3)
    assert shares(room.step()) == [(a, 1), (b, 9), (c, 1)]
    assert shares(room.step()) == [(a, 1), (b, 1), (c, 2)]


def test_drafting_sequences_stand_first() -> None:
    room = Room(chunk=10)
    a, b, c = room.add(30, 3, 2)
    room.scheduler.running = []
    for _ in range(6):
        batch = room.step()
        drafts = [item.drafts for item in batch.items]
        assert drafts == sorted(drafts, reverse=True)
        assert batch.drafting == [item.sequence for item in batch.items][: sum(drafts)]
        assert batch.num_chain_rows == sum(len(chain.tokens) for chain in batch.chains)
    assert batch.completing == [a, b, c]


def test_a_prompt_of_one_token_takes_part_in_the_step_that_starts_it() -> None:
    room = Room()
    one, other = room.add(1, 1)
    batch = room.step()
    assert batch.started == [one, other] == batch.drafting
    assert shares(batch) == [(one, 1), (other, 1)]


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    room = Room(num_slots=150)
    old, middle, young, late = room.add(6, 6, 6, 90)
    while room.scheduler.take_preemptions() == 0:
        room.step()
        assert room.conserved()
    assert room.scheduler.running == [old, middle]
    assert list(room.scheduler.waiting) == [young, late]
    assert young.num_computed == 0
    assert young.row is None
    assert len(young.tokens) > 30
    removed(room, [old, middle])
    assert room.step().started == [young]


def test_the_oldest_always_gets_on() -> None:
    room = Room(num_slots=200, chunk=7)
    old, *_ = room.add(20, 60, 100)
    for _ in range(150):
        assert old in [item.sequence for item in room.step().items]
        assert room.conserved()


def test_preemptions_are_counted_once() -> None:
    room = Room()
    (sequence,) = room.add(3)
    room.step()
    room.scheduler.preempt(sequence)
    assert [room.scheduler.take_preemptions() for _ in range(2)] == [1, 0]
    assert room.slots.num_free == room.slots.capacity


def removed(room: Room, sequences: Items[Sequence]) -> None:
    for sequence in sequences:
        room.scheduler.remove(sequence)


def test_whoever_leaves_gives_everything_back() -> None:
    room = Room(lines=2)
    sequences = room.add(5, 30, 5)
    for _ in range(3):
        room.step()
    removed(room, sequences)
    assert room.slots.num_free == room.slots.capacity
    assert room.table.num_free_rows == 2
    assert room.step().items == []
