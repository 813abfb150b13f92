"""What a step costs each query: as measured, by what the same step would have taken without trees."""

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from service.engine.accounting import RequestAccounting, plain_seconds, seconds_as_they_are
from service.engine.scheduler import Batch
from service.engine.sequence import Finish, Sequence
from tests.service.engine.harness import greedy, request

END = Finish("length")


class OneSequence:
    """As much of a sequence as books look at; two are never equal."""

    def __init__(self, row: int, length: int = 10) -> None:
        self.table_row = row
        self.tokens = [1] * length
        self.num_prompt = 1
        self.request = request(str(row), [1], greedy())


def step(*sequences: OneSequence, reading: bool = False) -> Batch:
    items: list[Any] = [SimpleNamespace(sequence=one, completes=True, drafts=True, num_rows=1) for one in sequences]
    if reading:
        items.append(SimpleNamespace(sequence=OneSequence(9), completes=False, drafts=False, num_rows=7))
    return Batch(items, [])


def as_sequence(one: OneSequence) -> Sequence:
    return cast(Sequence, one)


def test_seconds_are_divided_by_the_prediction_and_shared() -> None:
    books, first, second = (
        RequestAccounting(lambda rows, context: rows * context),
        OneSequence(0, 10),
        OneSequence(1, 30),
    )
    books.enter(step(first, second), 3, [4, 0], [2, 0], 4.0, 16.0)
    books.enter(step(first), 5, [1], [0], 1.0, 2.0)
    query = books.close(as_sequence(first), END)
    assert query is not None
    assert (query.first_version, query.version) == (3, 5)
    assert (query.accepted, query.plain_steps) == ((2, 0), 0)
    assert query.draft_cost == 4.0 / 40 + 1.0 / 10
    assert query.verify_cost == 16.0 / 40 + 2.0 / 10
    assert query.seconds == 20.0 / 2 + 3.0
    other = books.close(as_sequence(second), END)
    assert other is not None
    assert (other.accepted, other.plain_steps, other.seconds) == ((), 1, 10.0)


def test_steps_that_read_prompts_belong_to_nobody() -> None:
    books, one = RequestAccounting(seconds_as_they_are), OneSequence(0)
    books.enter(step(one, reading=True), 1, [3, 0], [1], 1.0, 1.0)
    books.enter(step(one), 2, [3], [1], 0.5, 0.25)
    query = books.close(as_sequence(one), END)
    assert query is not None
    assert (query.accepted, query.draft_cost, query.verify_cost, query.seconds) == ((1,), 0.5, 0.25, 0.75)
    assert query.first_version == 1


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_only_an_end_of_its_own_makes_a_query(reason: str) -> None:
    books, one = RequestAccounting(seconds_as_they_are), OneSequence(0)
    books.enter(step(one), 1, [0], [0], 1.0, 1.0)
    assert books.close(as_sequence(one), Finish(cast(Any, reason))) is None
    assert books.close(as_sequence(one), END) is None


def test_a_forgotten_sequence_is_never_told() -> None:
    books, one = RequestAccounting(seconds_as_they_are), OneSequence(0)
    books.enter(step(one), 1, [0], [0], 1.0, 1.0)
    books.forget(as_sequence(one))
    assert books.close(as_sequence(one), END) is None


def test_a_row_may_change_when_a_sequence_starts_again() -> None:
    books, one = RequestAccounting(seconds_as_they_are), OneSequence(0)
    books.enter(step(one), 1, [0], [0], 1.0, 1.0)
    one.table_row = 4
    books.enter(step(one), 1, [0], [0], 1.0, 1.0)
    query = books.close(as_sequence(one), END)
    assert query is not None
    assert query.row == 4


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
