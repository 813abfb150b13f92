"""Waiting lines: by client, priority and arrival."""

from service.engine.sequence import Sequence
from service.engine.waiting import WaitingLines
from tests.service.engine.test_scheduler import sequence_of


def arrived(number: int, client: str = "", priority: int = 0) -> Sequence:
    sequence = sequence_of(3, client=client, priority=priority)
    sequence.number = number
    return sequence


def test_a_line_is_ordered_by_priority_then_arrival() -> None:
    lines = WaitingLines()
    late, early, urgent = arrived(2), arrived(1), arrived(3, priority=-1)
    for sequence in (late, early, urgent):
        lines.add(sequence)
    assert lines.line("") == [urgent, early, late]


def test_every_client_has_a_line_while_it_waits() -> None:
    lines = WaitingLines()
    mine, yours = arrived(0, "a"), arrived(1, "b")
    assert not lines
    lines.add(mine)
    lines.add(yours)
    assert (lines.clients, len(lines), list(lines)) == (["a", "b"], 2, [mine, yours])
    lines.remove(mine)
    assert (lines.clients, len(lines)) == (["b"], 1)
    assert (mine in lines, yours in lines) == (False, True)


def test_equal_places_do_not_compare_sequences() -> None:
    lines = WaitingLines()
    first, second = arrived(5), arrived(5)
    lines.add(first)
    lines.add(second)
    lines.remove(second)
    assert list(lines) == [first]
