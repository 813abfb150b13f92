"""What a step costs each query, with and without prompts that are read in the same forward."""

from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drafters.feedback import Query
from drafters.registry import NoDrafter
from service.engine.accounting import SentStep, StepAccounting, charge, query_of
from service.engine.scheduler import StepBatch
from service.engine.sequence import Sequence
from tests.service.engine.harness import budget_of, greedy, load_of, request


class OneSequence:
    """As much of a sequence as accounting looks at; two are never equal."""

    def __init__(self, length: int = 10) -> None:
        self.tokens = [1] * length
        self.num_prompt = 1
        self.request = request("r", [1], greedy())
        self.client = self.request.scope.account
        self.sampling = SimpleNamespace(params=self.request.sampling)
        self.accepted_per_step, self.drafted_per_step = [2, 1, 0], [4, 0, 1]
        self.charged_seconds, self.first_version, self.version = 0.0, -1, -1


def step(*sequences: OneSequence, reading: OneSequence | None = None, completes: bool = False) -> StepBatch:
    """All decode, and one reads seven tokens of its prompt."""
    items: list[Any] = [SimpleNamespace(sequence=one, completes=True, decodes=True, num_rows=1) for one in sequences]
    if reading:
        items.append(SimpleNamespace(sequence=reading, completes=completes, decodes=False, num_rows=7))
    return StepBatch(items, [])


def query(one: OneSequence) -> Query:
    return query_of(cast(Sequence, one), 5)


def test_seconds_are_shared() -> None:
    first, second = OneSequence(10), OneSequence(30)
    charge(step(first, second), 3, [4, 0], {"draft": 4.0, "verify": 16.0})
    charge(step(first), 5, [1], {"draft": 1.0, "verify": 2.0})
    reported, other = query(first), query(second)
    assert (reported.row, reported.first_version, reported.version) == (5, 3, 5)
    assert (reported.accepted, reported.plain_steps) == ((2, 0), 1)
    assert reported.seconds == 20.0 / 2 + 3.0
    assert other.seconds == 10.0


@pytest.mark.parametrize("completes", [False, True])
def test_steps_that_read_prompts_too_count_by_the_rows_that_decode(completes: bool) -> None:
    first, second, reader = OneSequence(), OneSequence(), OneSequence()
    batch = step(first, second, reading=reader, completes=completes)
    charge(batch, 1, [3, 0, 0], {"draft": 1.0, "verify": 20.0, "follow": 2.0, "other": 2.0})
    reported, other = query(first), query(second)
    assert reported.seconds == other.seconds == (1.0 + 24.0 * (2 + 3) / (2 + 3 + 7)) / 2
    assert query(reader).seconds == 0.0, "no drafter makes prompts shorter"
    assert reported.first_version == 1


def test_a_step_that_reads_prompts_alone_is_charged_to_no_query() -> None:
    reader = OneSequence()
    charge(step(reading=reader, completes=True), 4, [0], {"draft": 1.0, "verify": 1.0})
    assert (query(reader).seconds, query(reader).first_version) == (0.0, 4)


def test_rows_of_a_forward_are_those_that_ran() -> None:
    """Trees of three nodes and of none in widths of seven: the others are padding."""
    batch = step(OneSequence(), OneSequence(), reading=OneSequence())
    budget = budget_of(load_of(2, prompt_rows=7), (3, 0, 0), node_rows=(7, 7, 0))
    books = StepAccounting(NoDrafter(), perf_counter)
    sent = SentStep(batch, budget, clock=books.start_step(idle=False), sent=[], accepted=[1, 0], gaps=(), preemptions=0)
    stats, _ = books.end_step(sent)
    assert (stats.prompt_tokens, stats.drafted_nodes, stats.verify_rows) == (7, 3, 1 + 1 + 7 + 14)
