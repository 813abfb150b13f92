"""The waiting queue: a body unfolds as places come free, at its client's turn, and costs nothing while it waits."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from service.engine.requests import GenerationRequest, Scope, Submission
from service.engine.sequence import Sequence, new_sequence
from service.engine.waiting import Entry, WaitingQueue
from tests.service.engine.harness import LIMITS, Generated, ask, generate, greedy, request, tiny_engine, waiting_in
from tests.service.engine.test_scheduler import Room, request_of
from tests.tiny_models import random_prompts


def body() -> Submission:
    return Submission([request(name, [5] * 4, greedy(6), n=2) for name in "012"])


def unfolded(entry: Entry) -> Iterator[tuple[str, int, int]]:
    while (head := entry.head) is not None:
        yield head.request.request_id, head.index, head.arrival
        entry.advance()


def test_a_body_is_one_entry_whose_sequences_come_to_be_one_by_one() -> None:
    asked = body()
    entry = Entry(asked, 10)
    assert entry.num_sequences == 6
    assert list(unfolded(entry)) == [("0", 0, 10), ("0", 1, 11), ("1", 0, 12), ("1", 1, 13), ("2", 0, 14), ("2", 1, 15)]
    assert (entry.num_sequences, asked.waits) == (0, False)


@pytest.mark.parametrize("gone", [{"0"}, {"1"}, {"0", "2"}, {"0", "1", "2"}])
def test_requests_leave_a_body_that_has_begun_to_start(gone: set[str]) -> None:
    for started in range(6):
        entry, queue = Entry(body(), 0), WaitingQueue()
        before = [(name, index) for name, index, _ in unfolded(Entry(body(), 0))]
        queue.add(entry)
        for _ in range(started):
            queue.take(waiting_in(queue)[0])
        removed = queue.remove(gone)
        left = [one for one in before[started:] if one[0] not in gone]
        assert len(removed) == (before[started][0] in gone), "of those that leave, only the next one existed"
        assert queue.num_sequences == len(left)
        for name, index in left:
            (head,) = waiting_in(queue)
            assert (head.request.request_id, head.index) == (name, index)
            queue.take(head)
        assert waiting_in(queue) == []


def test_a_body_of_thousands_holds_one_sequence_and_starts_as_places_come_free(monkeypatch: pytest.MonkeyPatch) -> None:
    made, of = list[Sequence](), new_sequence

    def counted(asked: GenerationRequest, index: int) -> Sequence:
        made.append(of(asked, index))
        return made[-1]

    monkeypatch.setattr("service.engine.waiting.new_sequence", counted)
    engine = tiny_engine("llama")
    params = replace(greedy(2), presence_penalty=0.1)
    ask(engine, *(request(str(number), [5, 6, 7], params, n=8) for number in range(256)))
    assert (engine.load.num_waiting, len(made)) == (2048, 1)
    engine.step()
    assert (len(engine.scheduler.running), len(made)) == (LIMITS.max_sequences, LIMITS.max_sequences + 1)
    assert not hasattr(made[-1], "sampling"), "what waits has no tensors"
    engine.abort(*map(str, range(256)))
    assert engine.idle
    engine.assert_conserved()


def test_preempted_sequences_sample_on_as_if_nothing_had_happened() -> None:
    params = [replace(greedy(40), repetition_penalty=1.3), replace(greedy(40), frequency_penalty=0.4, temperature=0.8)]
    asked = [request(str(number), text, params[number % 2]) for number, text in enumerate(random_prompts(4, 30))]
    alone = {one.request_id: generate(tiny_engine(), one)[one.request_id, 0].tokens for one in asked}
    engine = tiny_engine(limits=replace(LIMITS, prefix_cache=True))
    ask(engine, *asked)
    results = {(one.request_id, 0): Generated() for one in asked}
    while not engine.idle:
        for output in engine.step().outputs:
            results[output.request_id, 0].add(output)
        if len(engine.scheduler.running) > 1:
            engine.scheduler.preempt(engine.scheduler.running[-1])
    assert {name: result.tokens for (name, _), result in results.items()} == alone


def test_a_key_runs_no_more_than_it_may_and_the_rest_of_its_body_waits() -> None:
    room = Room(lines=8)
    limited = replace(request_of(5), n=6, scope=Scope(key="one", max_running=2))
    room.ask(limited)
    (other,) = room.add(5, client="other")
    room.step()
    assert [sequence.client for sequence in room.scheduler.running] == ["one", "other", "one"]
    room.scheduler.remove(room.scheduler.running[0])
    room.step()
    assert [sequence.index for sequence in room.scheduler.running if sequence is not other] == [1, 2]


def test_a_client_with_less_than_its_share_of_the_lines_gets_it() -> None:
    """Half of them each, of a body that had them all."""
    room = Room(lines=8, num_slots=4000, keep=True)
    room.ask(replace(request_of(5, client="much"), n=100))
    room.steps(2)
    room.ask(replace(request_of(6, client="little"), n=100))
    room.steps(3)
    running = [sequence.client for sequence in room.scheduler.running]
    assert (running.count("much"), running.count("little")) == (4, 4)
    assert room.scheduler.take_preemptions() == 4


def test_who_comes_back_before_the_one_that_starts_is_not_taken_for_it() -> None:
    """A sequence is preempted for one of another client, whose earlier one waits for the prompt that it was reading."""
    room, prompt = Room(lines=2, num_slots=8000, chunk=60, keep=True), [7] * 1500
    old = room.ask(request_of(3, client="much"))
    victim = room.ask(replace(request_of(3, client="much"), prompt=(*prompt, 1)))
    room.step()
    parked = room.ask(replace(request_of(3, client="little"), prompt=(*prompt, 2)))
    room.step()
    late = room.ask(request_of(5, client="little"))
    room.step()
    assert room.scheduler.running == [old, late]
    assert waiting_in(room.scheduler.queue) == [victim, parked]


def test_who_waits_for_a_prompt_that_is_given_up_starts_itself() -> None:
    room = Room(lines=4, num_slots=4000, chunk=50, keep=True)
    first, second = (room.ask(replace(request_of(3), prompt=(*[7] * 1500, 8, number))) for number in range(2))
    room.steps(3)
    assert room.scheduler.running == [first]
    room.scheduler.remove(first)
    assert room.step().started == [second]
    assert second.num_cached > 100
