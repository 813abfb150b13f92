"""What is known of each sequence: positions and slots in a window, and the entries that wait."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.network.pool import Backlog, EntryPool, EntryState
from drafters.protocol import DraftContext, DraftingSizes, HostMetadata
from drafters.tree import Candidates
from tests.drafters.network.parts import FedDrafter, serving, target_config, tiny_drafter

WIDTH = 3


def state(**changes: Any) -> EntryState:
    pool = EntryPool(serving(tiny_drafter(block_size=3, **changes)), 300)
    return EntryState(DraftingSizes(max_sequences=3, max_length=64, max_nodes=0), pool, WIDTH, torch.float32)


def known(entries: EntryState, row: int) -> list[int]:
    """Places of a row's entries."""
    return entries.table[row, : int(entries.known(rows(row)))].tolist()


def commit(entries: EntryState, row: int, start: int, count: int) -> None:
    """Positions start.. in slots 100 + position, followed by tokens 200 + position."""
    rows, counts = torch.tensor([row]), torch.tensor([count])
    positions = start + torch.arange(count)[None]
    features = positions[:, :, None].float().expand(-1, -1, WIDTH)
    entries.wait(rows, torch.tensor([start]), counts, 100 + positions, features, 200 + positions)


def rows(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def test_padding_reaches_no_one() -> None:
    entries = state()
    slots, tokens = torch.tensor([[100, 7, 8], [200, 201, 202]]), torch.tensor([[1, -1, -1], [2, 3, 4]])
    counts = torch.tensor([1, 3])
    entries._pool.hold(torch.tensor([7, 8]))
    entries.wait(rows(0, 2), torch.tensor([0, 4]), counts, slots, torch.zeros(2, 3, WIDTH), tokens)
    assert entries._pool.holds(torch.tensor([7, 8])).all()
    commit(entries, 0, 1, 2)
    waiting = entries.take(rows(0, 2), 3)
    assert waiting.tokens.tolist() == [[1, 201, 202], [2, 3, 4]]
    assert waiting.positions.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert waiting.slots.tolist() == [[100, 101, 102], [200, 201, 202]]


def test_a_text_read_from_its_middle_begins_there() -> None:
    entries = state()
    commit(entries, 0, 30, 3)
    assert known(entries, 0) == [130, 131, 132]
    commit(entries, 0, 40, 2)
    assert known(entries, 0) == [140, 141]


def test_a_row_that_starts_again_forgets_where_the_old_text_began() -> None:
    entries = state()
    commit(entries, 0, 30, 3)
    entries.start([0])
    commit(entries, 0, 0, 4)
    assert known(entries, 0) == [100, 101, 102, 103]
    assert entries.take(rows(0), 4).positions.tolist() == [[0, 1, 2, 3]]


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


def test_steps_without_a_report_count_as_much_as_one_can_bring() -> None:
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


# A text that begins where another has left its slots: the drafter finds its entries there, and reads none that it
# never ran.

LENGTH = 40


class Feed(FedDrafter):
    """A drafter of one sequence in two rows; everything never written is NaN."""

    def __init__(self, *, entries: str = "first", trained_length: int = 512) -> None:
        target_config("llama")  # made once, with random numbers that the drafter's own must not depend on
        model = tiny_drafter(block_size=4, prefix_entries=entries, trained_length=trained_length)
        super().__init__(model, sequences=1, rows=2, length=LENGTH, max_nodes=12)
        self.pool = self.drafter._grower.pool
        self.scrawl()

    def scrawl(self) -> None:
        """Make everything that is stored unusable."""
        self.pool.storage[:, :, self.pool.entries :] = math.nan

    def start(self, row: int, length: int, cached: int = 0) -> None:
        tokens: list[int] = self.tokens[0, :length].tolist()
        self.drafter.start([DraftContext(row, tokens, cached=self.slots[0, :cached])])

    def whole(self, row: int, length: int) -> Candidates:
        """Read a prompt from its beginning and draft after it."""
        self.start(row, length)
        self.read(row, 0, length - 1)
        self.commit([row], [length - 1])
        return self.grow([row], [length])


def assert_alike(tree: Candidates, expected: Candidates) -> None:
    assert tree.num_nodes.tolist() == expected.num_nodes.tolist() != [0]
    assert tree.tokens.equal(expected.tokens)
    assert tree.parents.equal(expected.parents)
    assert tree.survival.allclose(expected.survival, atol=1e-5)


@pytest.mark.parametrize("entries", ["first", "all"])
@pytest.mark.parametrize("cached", [1, 17, 29])
def test_a_found_prefix_drafts_as_one_that_was_read(entries: str, cached: int) -> None:
    expected = Feed(entries=entries).whole(0, 30)
    feed = Feed(entries=entries)
    feed.whole(1, 30)
    feed.drafter.finish([1])
    feed.start(0, 30, cached)
    if cached < 29:
        feed.read(0, cached, 29)
    feed.commit([0], [29])
    assert_alike(feed.grow([0], [30]), expected)


def test_a_prefix_makes_a_difference() -> None:
    feed = Feed()
    feed.start(0, 30)
    feed.read(0, 17, 29)
    feed.commit([0], [29])
    assert not feed.grow([0], [30]).survival.allclose(Feed().whole(0, 30).survival, atol=1e-3)


def test_entries_that_were_never_run_are_not_read() -> None:
    """The last positions of an answer wait for a forward that does not come once the answer has ended."""
    feed = Feed()
    feed.whole(1, 20)
    for position in range(20, 24):
        feed.commit([1], [position])
    feed.drafter.finish([1])
    feed.start(0, 30, cached=24)
    feed.read(0, 24, 29)
    feed.commit([0], [29])
    tree = feed.grow([0], [30])
    assert tree.survival.isfinite().all()
    assert int(tree.num_nodes) > 0
    seen = feed.pool.holds(feed.slots[0])
    assert seen[:30].tolist() == [True] * 20 + [False] * 4 + [True] * 6


def test_what_stood_in_a_slot_before_is_not_read() -> None:
    """Positions that no block will see are not run; their slots may still hold another text's entries."""
    feed = Feed(trained_length=8)
    feed.whole(1, 12)
    feed.drafter.finish([1])
    feed.scrawl()
    feed.start(1, 30)
    feed.read(1, 0, 15)
    feed.drafter.finish([1])
    feed.start(0, 20, cached=15)
    feed.read(0, 15, 19)
    feed.commit([0], [19])
    tree = feed.grow([0], [20])
    assert tree.survival.isfinite().all()
    assert int(tree.num_nodes) > 0


def test_what_an_answer_left_waiting_hides_what_stood_there() -> None:
    feed = Feed()
    feed.whole(1, 30)
    feed.drafter.finish([1])
    feed.scrawl()
    feed.start(1, 3)
    for position in range(2, 7):
        feed.commit([1], [position])
    feed.drafter.finish([1])
    assert feed.pool.holds(feed.slots[0, 2:7]).tolist() == [False] * 5


def test_without_an_anchor_nothing_is_drafted() -> None:
    """All but the last token was found: the features before it are not there."""
    feed = Feed()
    feed.whole(1, 30)
    feed.drafter.finish([1])
    feed.start(0, 30, cached=29)
    assert feed.grow([0], [29]).num_nodes.tolist() == [0]
    feed.commit([0], [29])
    assert_alike(feed.grow([0], [30]), Feed().whole(0, 30))
