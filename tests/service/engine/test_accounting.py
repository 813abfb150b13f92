"""What a step costs each query: as measured, by what the same step would have taken without trees."""

from types import SimpleNamespace
from typing import Any, cast

from drafters.feedback import Query
from service.engine.accounting import charge, query_of, step_stats
from service.engine.budget import Budget, Load
from service.engine.scheduler import Batch
from service.engine.sequence import Account, Sequence
from tests.service.engine.harness import greedy, request


class OneSequence:
    """As much of a sequence as accounting looks at; two are never equal."""

    def __init__(self, length: int = 10) -> None:
        self.tokens = [1] * length
        self.num_prompt = 1
        self.request = request("r", [1], greedy())
        self.sampling = SimpleNamespace(params=self.request.sampling)
        self.account = Account()


def step(*sequences: OneSequence, reading: bool = False) -> Batch:
    items: list[Any] = [SimpleNamespace(sequence=one, completes=True, drafts=True, num_rows=1) for one in sequences]
    if reading:
        items.append(SimpleNamespace(sequence=OneSequence(), completes=False, drafts=False, num_rows=7))
    return Batch(items, [])


def query(one: OneSequence) -> Query:
    return query_of(cast(Sequence, one), 5)


def test_seconds_are_shared() -> None:
    first, second = OneSequence(10), OneSequence(30)
    charge(step(first, second), 3, [4, 0], [2, 0], {"draft": 4.0, "verify": 16.0})
    charge(step(first), 5, [1], [0], {"draft": 1.0, "verify": 2.0})
    told, other = query(first), query(second)
    assert (told.row, told.first_version, told.version) == (5, 3, 5)
    assert (told.accepted, told.plain_steps) == ((2, 0), 0)
    assert told.seconds == 20.0 / 2 + 3.0
    assert (other.accepted, other.plain_steps, other.seconds) == ((), 1, 10.0)


def test_steps_that_read_prompts_belong_to_nobody() -> None:
    one = OneSequence()
    charge(step(one, reading=True), 1, [3, 0], [1], {"draft": 1.0, "verify": 1.0})
    charge(step(one), 2, [3], [1], {"draft": 0.5, "verify": 0.25})
    told = query(one)
    assert (told.accepted, told.seconds) == ((1,), 0.75)
    assert told.first_version == 1


def test_rows_of_a_forward_are_those_that_ran() -> None:
    """Trees of three nodes and of none in widths of seven: the others are padding."""
    batch = step(OneSequence(), OneSequence(), reading=True)
    load = Load(batch.num_extend_rows, 10.0, 100, num_drafting=2, num_sequences=3)
    budget = Budget(load, "cost", (7, 7, 0), drafted=True, followed=True, nodes=(3, 0, 0))
    seconds = {"draft": 1.0, "verify": 1.0, "follow": 0.0, "other": 0.0}
    stats = step_stats(batch, budget, [1, 0], [], seconds, credited={}, gaps=(), preemptions=0)
    assert (stats.prompt_tokens, stats.drafted_nodes, stats.verify_rows) == (7, 3, 1 + 1 + 7 + 14)
