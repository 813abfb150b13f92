"""A text that begins where another has left its slots: the drafter finds its entries there, and reads none that it
never ran."""

import math

import pytest
import torch

from drafters.protocol import DraftContext
from drafters.tree import Candidates
from tests.drafters.specblock.parts import FedDrafter, target_config, tiny_drafter

torch.set_num_threads(1)
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
