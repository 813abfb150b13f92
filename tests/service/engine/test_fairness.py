"""ServiceCounters of clients; and that a client that sends nine tenths of the load does not hold another up."""

from collections import deque
from dataclasses import replace

import pytest
import torch

from service.engine.sequence import Sequence
from service.engine.waiting import PROMPT_SHARE, ServiceCounters, service_of
from tests.service.engine.test_scheduler import Room, request_of, sequence_of

CPU = torch.device("cpu")


def entered(accounts: ServiceCounters, client: str, *present: str, prompt: int = 10) -> Sequence:
    accounts.enter(client, present)
    return sequence_of(prompt, client=client)


def write(accounts: ServiceCounters, sequence: Sequence, count: int) -> None:
    sequence.tokens += [1] * count
    sequence.num_computed = len(sequence.tokens) - 1
    accounts.settle(sequence)


def test_reading_and_writing_are_charged_once() -> None:
    accounts = ServiceCounters()
    sequence = entered(accounts, "a")
    sequence.num_computed = 6
    accounts.settle(sequence)
    assert accounts.served("a") == 6 * PROMPT_SHARE
    write(accounts, sequence, 3)
    accounts.settle(sequence)
    assert accounts.served("a") == service_of(sequence) == 10 * PROMPT_SHARE + 3


def test_reading_again_after_a_preemption_is_not_charged() -> None:
    accounts = ServiceCounters()
    sequence = entered(accounts, "a")
    write(accounts, sequence, 8)
    before = accounts.served("a")
    for computed in (0, 5, 17):
        sequence.num_computed = computed
        accounts.settle(sequence)
    assert accounts.served("a") == before
    write(accounts, sequence, 1)
    assert accounts.served("a") == before + 1


def test_a_found_prefix_is_free() -> None:
    accounts = ServiceCounters()
    sequence = entered(accounts, "a")
    sequence.num_computed = 8
    accounts.waive(sequence)
    write(accounts, sequence, 1)
    assert accounts.served("a") == 2 * PROMPT_SHARE + 1


def test_a_newcomer_starts_level_with_the_least_served() -> None:
    accounts = ServiceCounters()
    write(accounts, entered(accounts, "a", prompt=0), 100)
    write(accounts, entered(accounts, "b", "a", prompt=0), 30)
    accounts.enter("c", "ab")
    assert [accounts.served(client) for client in "abc"] == [100, 130, 100]


def test_who_comes_back_keeps_what_it_had_more_but_saves_nothing_up() -> None:
    accounts = ServiceCounters()
    for client, count, present in (("a", 100, ""), ("b", 10, "a"), ("c", 0, "ab")):
        write(accounts, entered(accounts, client, *present, prompt=0), count)
    # The first one here was alone when it was served, so the others began where it stood.
    assert [accounts.served(client) for client in "abc"] == [100, 110, 100]
    write(accounts, entered(accounts, "c", *"abc", prompt=0), 50)
    accounts.enter("a", "c")
    accounts.enter("b", "ac")
    assert [accounts.served(client) for client in "abc"] == [150, 150, 150]


def test_accounts_are_forgotten_when_no_one_is_there() -> None:
    accounts = ServiceCounters()
    write(accounts, entered(accounts, "a"), 100)
    accounts.enter("b", "")
    accounts.enter("a", "b")
    assert (accounts.served("a"), accounts.served("b")) == (0, 0)


class Shop:
    """A server in imagined time: a step costs a fixed time and some for each row; streams ask again when answered."""

    PROMPT, ANSWER = 60, 40

    def __init__(self, *, step: float, row: float, one_account: bool = False) -> None:
        self._room = Room(num_slots=1_500, lines=8, chunk=64, keep=True)
        self._step, self._row = step, row
        self._one_account = one_account
        self._asked: dict[Sequence, tuple[str, float]] = {}
        self._first_tokens = iter(range(10**6))
        self._now = 0.0

    def p95(self, streams: dict[str, int], *, of: str, answers: int = 60) -> float:
        """95th percentile of the time from request to answer of one client's requests."""
        latencies: deque[float] = deque(maxlen=answers - 10)  # without those of the beginning
        for client, count in streams.items():
            for _ in range(count):
                self._ask(client)
        seen = 0
        while seen < answers:
            for sequence in self._run():
                client, asked = self._asked[sequence]
                if client == of:
                    latencies.append(self._now - asked)
                    seen += 1
                self._ask(client)
        return float(torch.tensor(list(latencies)).quantile(0.95))

    def _ask(self, client: str) -> None:
        account = "" if self._one_account else client
        request = request_of(self.PROMPT, client=account, max_tokens=self.ANSWER)
        prompt = (next(self._first_tokens), *request.prompt[1:])
        self._asked[self._room.ask(replace(request, prompt=prompt))] = client, self._now

    def _run(self) -> list[Sequence]:
        """One step; returns those that ended in it."""
        batch = self._room.step()
        self._now += self._step + self._row * batch.num_extend_rows
        ended = [item.sequence for item in batch.items if item.sequence.num_remaining == 0]
        for sequence in ended:
            self._room.scheduler.remove(sequence)
        return ended


DEARER = pytest.mark.slow("the same with dearer rows", covers="service/engine/waiting.py service/engine/scheduler.py")


# Milliseconds of a small model on a CPU, and the same with rows twice as dear.
@pytest.mark.parametrize(
    ("step", "row", "little", "much"), [(13.0, 0.55, 1, 18), pytest.param(12.0, 1.1, 2, 36, marks=DEARER)]
)
def test_a_client_with_most_of_the_load_makes_no_other_wait_for_a_place(
    step: float, row: float, little: int, much: int
) -> None:
    """Eight sequences run at once: an answer takes as long as in a server that is just full."""
    full = Shop(step=step, row=row).p95({"little": 8}, of="little")
    loaded = Shop(step=step, row=row).p95({"much": much, "little": little}, of="little")
    unfair = Shop(step=step, row=row, one_account=True).p95({"much": much, "little": little}, of="little")
    print(f"{full:.0f} in a full server, {loaded:.0f} beside {much}, {unfair:.0f} in order of arrival")
    assert loaded <= 1.2 * full
    assert unfair > 1.5 * loaded
