"""What a step costs each query: as measured, by what the same step would have taken without trees."""

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from drafters.feedback import Query
from service.engine.accounting import PlainSeconds, charge, plain_seconds, query_of
from service.engine.scheduler import Batch
from service.engine.sequence import Account, Sequence
from tests.service.engine.harness import greedy, request


class OneSequence:
    """As much of a sequence as accounting looks at; two are never equal."""

    def __init__(self, length: int = 10) -> None:
        self.tokens = [1] * length
        self.num_prompt = 1
        self.request = request("r", [1], greedy())
        self.account = Account()


def step(*sequences: OneSequence, reading: bool = False) -> Batch:
    items: list[Any] = [SimpleNamespace(sequence=one, completes=True, drafts=True, num_rows=1) for one in sequences]
    if reading:
        items.append(SimpleNamespace(sequence=OneSequence(), completes=False, drafts=False, num_rows=7))
    return Batch(items, [])


def query(one: OneSequence) -> Query:
    return query_of(cast(Sequence, one), 5)


def test_seconds_are_divided_by_the_prediction_and_shared() -> None:
    first, second = OneSequence(10), OneSequence(30)
    plain: PlainSeconds = lambda rows, context: rows * context  # noqa: E731
    charge(step(first, second), 3, [4, 0], [2, 0], {"draft": 4.0, "verify": 16.0}, plain)
    charge(step(first), 5, [1], [0], {"draft": 1.0, "verify": 2.0}, plain)
    told, other = query(first), query(second)
    assert (told.row, told.first_version, told.version) == (5, 3, 5)
    assert (told.accepted, told.plain_steps) == ((2, 0), 0)
    assert told.draft_cost == 4.0 / 40 + 1.0 / 10
    assert told.verify_cost == 16.0 / 40 + 2.0 / 10
    assert told.seconds == 20.0 / 2 + 3.0
    assert (other.accepted, other.plain_steps, other.seconds) == ((), 1, 10.0)


def test_steps_that_read_prompts_belong_to_nobody() -> None:
    one = OneSequence()
    charge(step(one, reading=True), 1, [3, 0], [1], {"draft": 1.0, "verify": 1.0}, plain_seconds(None))
    charge(step(one), 2, [3], [1], {"draft": 0.5, "verify": 0.25}, plain_seconds(None))
    told = query(one)
    assert (told.accepted, told.draft_cost, told.verify_cost, told.seconds) == ((1,), 0.5, 0.25, 0.75)
    assert told.first_version == 1


class Table:
    """Counts how often it is asked."""

    asked = 0

    def verify_seconds(self, rows: Any, context: float, sequences: int = 1) -> Any:
        self.asked += 1
        return np.array([rows[0] * 1000 + context])


def test_the_table_is_asked_once_per_stretch_of_context() -> None:
    table = Table()
    seconds = plain_seconds(cast(Any, table))
    assert {seconds(2, context) for context in range(32, 64)} == {2048.0}
    assert table.asked == 1
    assert seconds(3, 40.0) == 3048.0
    assert math.isclose(seconds(2, 64.0), 2080.0)
    assert table.asked == 3
