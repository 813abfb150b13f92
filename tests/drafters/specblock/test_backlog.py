"""How many entries can wait, by what the host knows a step later."""

from drafters.protocol import HostMetadata
from drafters.specblock.backlog import Backlog


def one(root: int) -> HostMetadata:
    return HostMetadata((1,), (root,))


def test_the_next_root_says_how_many_were_committed() -> None:
    backlog = Backlog(2)
    backlog.add(one(10), 9)
    assert backlog.take(one(13)) == 3
    assert backlog.take(one(13)) == 0


def test_until_then_the_most_is_assumed() -> None:
    backlog = Backlog(2)
    for root in (10, 12):
        assert backlog.crowded(one(root), 8).rows == ()
        backlog.add(one(root), 9)
    assert backlog.crowded(one(13), 2) == one(13)
    assert backlog.crowded(one(13), 3).rows == ()


def test_steps_nobody_told_of_count_as_much_as_one_can_bring() -> None:
    backlog = Backlog(2)
    backlog.add(one(10), 4)
    assert backlog.take(one(500)) == 4


def test_a_row_that_starts_again_has_nothing_waiting() -> None:
    backlog = Backlog(2)
    backlog.add(one(10), 4)
    backlog.clear([1])
    assert backlog.take(one(3)) == 0


def test_the_fullest_row_counts() -> None:
    backlog = Backlog(3)
    backlog.add(HostMetadata((0, 2), (5, 50)), 6)
    assert backlog.crowded(HostMetadata((0, 2), (7, 55)), 3) == HostMetadata((2,), (55,))
    assert backlog.take(HostMetadata((0, 2), (7, 55))) == 5
