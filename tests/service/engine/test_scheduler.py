"""Who takes part in a step: everyone's turn comes, one chunk for all prompts, and the cheapest gives way."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import pytest
import torch

from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.prefix_cache import PrefixCache
from service.engine.requests import GenerationRequest, SamplingParams, Scope, Submission
from service.engine.sampling import SamplingState
from service.engine.scheduler import Scheduler, StepBatch, cheapest
from service.engine.sequence import Sequence, TextStream, new_sequence
from service.engine.waiting import Forecast, PromptPace
from service.text.tokenizer import ChatTokenizer
from tests.service.engine.harness import greedy, request, waiting_in
from tests.tiny_models import VOCAB_SIZE, tiny_tokenizer

CPU = torch.device("cpu")
TOKENIZER = ChatTokenizer(tiny_tokenizer())


class Room:
    """A scheduler with its slots, and steps that commit every scheduled row and one more token."""

    def __init__(
        self,
        num_slots: int = 1000,
        lines: int = 4,
        chunk: int = 10,
        *,
        keep: bool = False,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.slots, self.table = SlotPool(num_slots + 1, CPU), SlotTable(lines, 2000, CPU)
        self.scheduler = Scheduler(
            self.slots,
            self.table,
            pace=PromptPace(chunk, now),
            on_start=begin,
            keeps_prefixes=keep,
            tree_nodes=8,
        )

    def add(self, *lengths: int, client: str = "", priority: int = 0) -> list[Sequence]:
        return [self.ask(request_of(length, client=client, priority=priority)) for length in lengths]

    def ask(self, *requests: GenerationRequest) -> Sequence:
        """Queue a body; returns its first sequence."""
        self.scheduler.add(Submission(requests))
        return waiting_in(self.scheduler.queue)[-1]

    def step(self) -> StepBatch:
        batch = self.scheduler.schedule()
        for item in batch.items:
            self.table.slots[item.sequence.table_row, item.start : item.start + item.num_rows] = self.slots.allocate(
                item.num_rows
            )
            item.sequence.num_computed += item.num_rows
            item.sequence.tokens += [1] if item.completes else []
        assert self.conserved()
        return batch

    def steps(self, count: int) -> list[StepBatch]:
        return [self.step() for _ in range(count)]

    def conserved(self) -> bool:
        every = [*self.scheduler.held_slots().tolist(), *self.slots.free_slots().tolist()]
        return sorted(every) == list(range(1, self.slots.capacity + 1))


def request_of(
    length: int, params: SamplingParams | None = None, *, client: str = "", priority: int = 0, max_tokens: int = 400
) -> GenerationRequest:
    asked = request("r", [2] * length, params or greedy(max_tokens))
    return replace(asked, scope=Scope(address=client), priority=priority)


def begin(sequence: Sequence) -> bool:
    params, prompt = sequence.request.sampling, sequence.request.prompt
    sequence.sampling = SamplingState(params, prompt, eos_ids=frozenset(), vocab=VOCAB_SIZE, device=CPU)
    sequence.text = TextStream(TOKENIZER.detokenizer(True), params)
    return True


def sequence_of(
    length: int, params: SamplingParams | None = None, *, client: str = "", priority: int = 0, max_tokens: int = 400
) -> Sequence:
    """A sequence that has begun."""
    asked = request_of(length, params, client=client, priority=priority, max_tokens=max_tokens)
    sequence = new_sequence(asked, 0)
    assert begin(sequence)
    return sequence


def shares(batch: StepBatch) -> list[tuple[Sequence, int]]:
    return [(item.sequence, item.num_rows) for item in batch.items]


def test_sequences_start_in_the_order_they_came() -> None:
    room = Room(lines=2)
    first, second, third = room.add(5, 5, 5)
    assert room.step().started == [first, second]
    room.scheduler.remove(first)
    assert room.step().started == [third]
    assert room.scheduler.running == [second, third]


def test_a_large_one_at_the_head_is_not_overtaken() -> None:
    room = Room(num_slots=180, chunk=100)
    running, large, small = room.add(30, 90, 2)
    assert room.step().started == [running]
    assert room.step().started == []
    assert waiting_in(room.scheduler.queue) == [large, small]


def test_one_chunk_is_shared_by_all_prompts_beside_the_decoding_rows() -> None:
    room = Room(chunk=10)
    a, b = room.add(4, 25)
    assert shares(room.step()) == [(a, 4), (b, 6)]
    assert shares(room.step()) == [(a, 1), (b, 10)]
    (c,) = room.add(3)
    assert shares(room.step()) == [(a, 1), (b, 9), (c, 1)]
    assert shares(room.step()) == [(a, 1), (b, 1), (c, 2)]


def test_a_prompt_of_one_token_takes_part_in_the_step_that_starts_it() -> None:
    room = Room()
    one, other = room.add(1, 1)
    batch = room.step()
    assert batch.started == [one, other] == batch.decoding
    assert shares(batch) == [(one, 1), (other, 1)]


def outgrown(room: Room, *, most: int = 300) -> None:
    """Step until somebody had to give way."""
    for _ in range(most):
        room.step()
        if waiting_in(room.scheduler.queue):
            return
    raise AssertionError("slots never ran out")


def test_the_cheapest_gives_way_and_comes_back_first() -> None:
    room = Room(num_slots=300, chunk=50)
    old, large, small = room.add(20, 60, 6)
    outgrown(room)
    assert room.scheduler.running == [old, large]
    assert waiting_in(room.scheduler.queue) == [small]
    assert (small.num_computed, small.row, small.preemptions) == (0, None, 1)
    (late,) = room.add(6)
    assert waiting_in(room.scheduler.queue) == [small, late]
    removed(room, [old])
    assert room.step().started[0] == small


def test_the_oldest_is_never_asked_and_always_gets_on() -> None:
    room = Room(num_slots=430, chunk=50)
    old, *_ = room.add(2, 60, 100)
    for _ in range(340):
        assert old in [item.sequence for item in room.step().items]
    assert room.scheduler.take_preemptions() > 0
    assert old.preemptions == 0


def test_a_sequence_that_gave_way_twice_is_spared_while_others_are_there() -> None:
    room = Room(num_slots=300, chunk=50)
    old, large, small = room.add(20, 60, 6)
    small.preemptions = 2
    outgrown(room)
    assert waiting_in(room.scheduler.queue) == [large]
    assert room.scheduler.running == [old, small]


def test_the_least_important_gives_way_first() -> None:
    room = Room(num_slots=300, chunk=50)
    old, small = room.add(20, 6)
    (large,) = room.add(60, priority=1)
    outgrown(room)
    assert waiting_in(room.scheduler.queue) == [large]
    assert room.scheduler.running == [old, small]


def test_a_lower_priority_value_starts_earlier() -> None:
    room = Room(lines=1)
    late, early, urgent = (*room.add(5, priority=1), *room.add(5), *room.add(5, priority=-3))
    order = []
    for _ in range(3):
        order += room.step().started
        removed(room, list(room.scheduler.running))
    assert order == [urgent, early, late]


def test_what_was_read_is_not_read_again() -> None:
    room = Room(keep=True, chunk=100)
    first, second = room.add(90, 90)
    assert room.step().started == [first], "the second waits for what the first is reading"
    assert shares(room.step()) == [(first, 1), (second, 1)]
    assert (first.num_cached, second.num_cached, second.num_shared) == (0, 89, 89)
    removed(room, [first, second])
    assert room.scheduler.num_available == room.slots.capacity
    assert room.slots.num_free < room.slots.capacity
    (third,) = room.add(80)
    assert shares(room.step()) == [(third, 1)]
    assert third.num_cached == 79


def test_who_was_preempted_finds_its_text_again() -> None:
    room = Room(keep=True, chunk=100)
    (one,) = room.add(90)
    room.steps(5)
    room.scheduler.preempt(one)
    batch = room.step()
    assert shares(batch) == [(one, 1)]
    assert batch.started == [one]
    assert one.num_cached == 0, "what it had computed itself was no gift"


def test_kept_texts_give_way_before_anybody_does() -> None:
    room = Room(num_slots=300, keep=True, chunk=100)
    removed(room, started(room, 90))
    assert room.slots.num_free == 210
    other = room.ask(replace(request_of(180), prompt=(5,) * 180))
    room.steps(60)
    assert room.scheduler.take_preemptions() == 0
    assert other.num_computed > 210


def test_texts_that_no_one_runs_can_be_forgotten() -> None:
    room = Room(keep=True, chunk=100)
    removed(room, started(room, 90))
    (one,) = room.add(60)
    room.step()
    room.scheduler.forget_prefixes()
    assert room.slots.num_free == room.slots.capacity - one.num_computed
    room.step()
    removed(room, [one])
    room.scheduler.forget_prefixes()
    assert room.slots.num_free == room.slots.capacity


def test_trees_find_room_beside_a_full_cache() -> None:
    room = Room(num_slots=592, keep=True, chunk=600)
    removed(room, started(room, 590))
    room.add(1)
    batch = room.scheduler.schedule()
    assert room.slots.num_free >= batch.num_extend_rows + 8


def started(room: Room, length: int) -> list[Sequence]:
    added = room.add(length)
    room.step()
    return added


def test_sharing_makes_room() -> None:
    """Many texts of one beginning fit where two of them would not."""
    room = Room(num_slots=550, lines=8, keep=True, chunk=400)
    started(room, 400)
    room.add(*[401] * 4)
    assert len(room.step().started) == 3
    assert room.scheduler.take_preemptions() == 0


def test_clients_take_turns_to_start() -> None:
    room = Room(lines=4, num_slots=2000)
    mine = room.add(*[5] * 6, client="much")
    yours = room.add(5, 5, client="little")
    assert room.step().started == [mine[0], yours[0], mine[1], yours[1]]


def test_a_client_that_runs_nothing_gets_a_line() -> None:
    room = Room(lines=3, keep=True)
    mine = room.add(5, 5, 5, client="much")
    room.steps(3)
    yours = room.add(6, 6, client="little")
    assert room.step().started == [yours[0]]
    assert room.scheduler.running == [mine[0], mine[1], yours[0]]
    assert mine[2] in waiting_in(room.scheduler.queue)
    room.step()
    assert room.scheduler.take_preemptions() == 1, "one line is enough for not being held up"


def test_every_running_sequence_decodes_in_every_step() -> None:
    room = Room(lines=32, num_slots=9000, chunk=100)
    mine = room.add(*[3] * 31, client="much")
    (yours,) = room.add(3, client="little")
    room.steps(4)
    assert [len(batch.decoding) for batch in room.steps(40)] == [32] * 40
    assert len({one.num_computed for one in (*mine, yours)}) == 1


def test_a_long_prompt_is_read_as_fast_beside_another_client_as_beside_the_same() -> None:
    steps = {}
    for client in ("same", "other"):
        room = Room(num_slots=9000, chunk=256)
        room.add(3, client=client)
        room.steps(5)
        (long,) = room.add(1900, client="same")
        steps[client] = next(number for number, _ in enumerate(room.steps(40)) if not long.is_prefilling)
    assert steps["other"] == steps["same"] <= 8


def test_no_text_is_preempted_for_one_that_still_finds_no_room() -> None:
    """One line and its slots can be had, but not as many slots as this prompt needs."""
    room = Room(lines=3, num_slots=500, chunk=500)
    mine = room.add(50, 50, 50, client="much")
    room.steps(2)
    room.add(450, client="little")
    room.steps(3)
    assert room.scheduler.running == mine
    assert room.scheduler.take_preemptions() == 0


def test_the_chunk_goes_to_the_client_that_is_served_less() -> None:
    room = Room(chunk=10, lines=8, num_slots=4000)
    (mine,) = room.add(100, client="much")
    room.steps(3)
    (yours,) = room.add(12, client="little")
    assert [shares(room.step()) for _ in range(2)] == [[(yours, 10)], [(mine, 10)]]


def removed(room: Room, sequences: Items[Sequence]) -> None:
    for sequence in sequences:
        room.scheduler.remove(sequence)


def written(count: int, *, prompt: int = 10, max_tokens: int = 400) -> Sequence:
    sequence = sequence_of(prompt, max_tokens=max_tokens)
    sequence.tokens += [1] * count
    return sequence


def to_write(forecast: Forecast, sequence: Sequence) -> int:
    return forecast.claim(sequence) - sequence.num_pending


def test_no_one_is_expected_to_write_more_than_it_may() -> None:
    assert to_write(Forecast(), written(0, max_tokens=5)) == 5
    assert to_write(Forecast(), written(300, max_tokens=302)) == 2


def test_what_is_still_to_be_read_is_claimed_too() -> None:
    forecast, sequence = Forecast(), written(0, prompt=30, max_tokens=5)
    assert forecast.claim(sequence) == 35
    sequence.num_computed = 20
    assert forecast.claim(sequence) == 15


@pytest.mark.parametrize("length", [8, 200])
def test_it_learns_how_long_answers_are(length: int) -> None:
    forecast = Forecast()
    for _ in range(200):
        forecast.observe(written(length))
    assert to_write(forecast, written(0)) == length
    assert to_write(forecast, written(length // 2)) == length - length // 2
    assert to_write(forecast, written(length * 2, max_tokens=800)) == length // 4, "who outlasts the others goes on"


def running(number: int, computed: int, *, priority: int = 0, preemptions: int = 0) -> Sequence:
    sequence = sequence_of(max(1, computed), priority=priority)
    sequence.arrival, sequence.num_computed, sequence.preemptions = number, computed, preemptions
    return sequence


def test_what_others_keep_alive_costs_nothing() -> None:
    cache = PrefixCache(CPU)
    shared = list(range(50))
    cache.release(cache.acquire("", shared), shared, torch.arange(1, 50))
    old, lone, sharing = running(0, 1), running(1, 20), running(2, 45)
    sharing.lease = cache.acquire("", shared)
    assert cheapest([old, lone, sharing], [old], cache) is lone
    old.lease = cache.acquire("", shared)
    assert cheapest([old, lone, sharing], [old], cache) is sharing
