"""A text that begins where another has left its slots: the drafter finds its entries there, and reads none that it
never ran."""

import math

import pytest
import torch

from drafters.protocol import Committed, DraftContext, DraftingSizes, Noise, Read
from drafters.specblock.blocks import TrainedWeights
from drafters.specblock.drafter import SpecBlockDrafter
from drafters.tree import Candidates, DraftTree, VerifyResult
from tests.drafters.specblock.parts import serving, target_config, tiny_drafter, tiny_embedding

torch.set_num_threads(1)
LENGTH = 40


class Texts:
    """A drafter, one text with made-up features, and where its positions lie; everything never written is NaN."""

    def __init__(self, *, entries: str = "first", trained_length: int = 512) -> None:
        target_config("llama")  # made once, with random numbers that the drafter's own must not depend on
        model = tiny_drafter(block_size=4, prefix_entries=entries, trained_length=trained_length)
        generator = torch.Generator().manual_seed(5)
        width = len(model.config.tap_layers) * model.config.hidden_size
        self.tokens: list[int] = torch.randint(0, 320, (LENGTH,), generator=generator).tolist()
        self.features = torch.randn(LENGTH, width, generator=generator)
        self.slots = torch.randperm(LENGTH, generator=generator) + 1
        sizes = DraftingSizes(max_sequences=2, max_length=LENGTH, max_nodes=12, num_slots=LENGTH + 1)
        self.drafter = SpecBlockDrafter(sizes, TrainedWeights(serving(model), tiny_embedding(model.config.hidden_size)))
        self.scrawl()

    def scrawl(self) -> None:
        """Make everything that is stored unusable."""
        storage = self.drafter._grower.pool.storage
        storage[:, :, self.drafter._grower.pool.entries :] = math.nan

    def start(self, row: int, length: int, cached: int = 0) -> None:
        self.drafter.start([DraftContext(row, self.tokens[:length], cached=self.slots[:cached])])

    def read(self, row: int, start: int, end: int) -> None:
        ahead = torch.tensor(self.tokens[start + 1 : end + 1])
        self.drafter.read(Read(row, start, ahead, self.slots[start:end], self.features[start:end]))

    def commit(self, row: int, position: int) -> None:
        """The token behind this position was chosen; nothing was drafted."""
        self.drafter.commit(
            Committed(
                rows=torch.tensor([row]),
                tokens=torch.tensor([[self.tokens[position + 1]]]),
                counts=torch.tensor([1]),
                tree=DraftTree.empty(1),
                result=VerifyResult(*(torch.zeros(1, 0, dtype=torch.int64) for _ in range(4))),
                features=self.features[None, position : position + 1],
                positions=torch.tensor([position]),
                slots=self.slots[None, position : position + 1],
            )
        )

    def grow(self, row: int, root: int) -> Candidates:
        noise = Noise(torch.zeros(1, dtype=torch.int64), torch.zeros(1), torch.tensor([root]))
        return self.drafter.grow(torch.tensor([row]), noise)

    def whole(self, row: int, length: int) -> Candidates:
        """Read a prompt from its beginning and draft behind it."""
        self.start(row, length)
        self.read(row, 0, length - 1)
        self.commit(row, length - 1)
        return self.grow(row, length)


def assert_alike(tree: Candidates, expected: Candidates) -> None:
    assert tree.num_nodes.tolist() == expected.num_nodes.tolist() != [0]
    assert tree.tokens.equal(expected.tokens)
    assert tree.parents.equal(expected.parents)
    assert tree.survival.allclose(expected.survival, atol=1e-5)


@pytest.mark.parametrize("entries", ["first", "all"])
@pytest.mark.parametrize("cached", [1, 17, 29])
def test_a_found_prefix_drafts_as_one_that_was_read(entries: str, cached: int) -> None:
    expected = Texts(entries=entries).whole(0, 30)
    texts = Texts(entries=entries)
    texts.whole(1, 30)
    texts.drafter.finish([1])
    texts.start(0, 30, cached)
    if cached < 29:
        texts.read(0, cached, 29)
    texts.commit(0, 29)
    assert_alike(texts.grow(0, 30), expected)


def test_a_prefix_makes_a_difference() -> None:
    texts = Texts()
    texts.start(0, 30)
    texts.read(0, 17, 29)
    texts.commit(0, 29)
    assert not texts.grow(0, 30).survival.allclose(Texts().whole(0, 30).survival, atol=1e-3)


def test_entries_that_were_never_run_are_not_read() -> None:
    """The last positions of an answer wait for a forward that does not come once the answer has ended."""
    texts = Texts()
    texts.whole(1, 20)
    for position in range(20, 24):
        texts.commit(1, position)
    texts.drafter.finish([1])
    texts.start(0, 30, cached=24)
    texts.read(0, 24, 29)
    texts.commit(0, 29)
    tree = texts.grow(0, 30)
    assert tree.survival.isfinite().all()
    assert int(tree.num_nodes) > 0
    seen = texts.drafter._grower.pool.holds(texts.slots)
    assert seen[:30].tolist() == [True] * 20 + [False] * 4 + [True] * 6


def test_what_stood_in_a_slot_before_is_not_read() -> None:
    """Positions that no block will see are not run; their slots may still hold another text's entries."""
    texts = Texts(trained_length=8)
    texts.whole(1, 12)
    texts.drafter.finish([1])
    texts.scrawl()
    texts.start(1, 30)
    texts.read(1, 0, 15)
    texts.drafter.finish([1])
    texts.start(0, 20, cached=15)
    texts.read(0, 15, 19)
    texts.commit(0, 19)
    tree = texts.grow(0, 20)
    assert tree.survival.isfinite().all()
    assert int(tree.num_nodes) > 0


def test_what_an_answer_left_waiting_hides_what_stood_there() -> None:
    texts = Texts()
    texts.whole(1, 30)
    texts.drafter.finish([1])
    texts.scrawl()
    texts.start(1, 3)
    for position in range(2, 7):
        texts.commit(1, position)
    texts.drafter.finish([1])
    assert texts.drafter._grower.pool.holds(texts.slots[2:7]).tolist() == [False] * 5


def test_without_an_anchor_nothing_is_drafted() -> None:
    """All but the last token was found: the features before it are not there."""
    texts = Texts()
    texts.whole(1, 30)
    texts.drafter.finish([1])
    texts.start(0, 30, cached=29)
    assert texts.grow(0, 29).num_nodes.tolist() == [0]
    texts.commit(0, 29)
    assert_alike(texts.grow(0, 30), Texts().whole(0, 30))
