"""The forwards of serving, with pool, window and live rows, against those of training over the whole text at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.network.model import SpecBlock
from drafters.network.pool import EntryPool, EntryState
from drafters.network.serving import Live, forward_of
from drafters.protocol import DraftingSizes
from drafters.trained.specblock import AUTHORS, FusedInput
from drafters.trained_kinds import TRAINED_KINDS, trained_kind
from drafters.training.corpus import Batch
from drafters.training.forward import forward_of as training_forward_of
from kernels.families import OF_DRAFTERS
from kernels.lattice import Picked, StartNodes
from tests.drafters.network.parts import serving, tiny_drafter, tiny_embedding

LENGTH, BLOCK = 24, 4
ROWS = torch.tensor([1, 0])


class Text:
    """Two sequences, what the target's layers gave for them, and the slots they lie in."""

    def __init__(self, model: SpecBlock) -> None:
        generator = torch.Generator().manual_seed(3)
        width = len(model.config.tap_layers) * model.config.hidden_size
        self.tokens = torch.randint(0, 320, (2, LENGTH), generator=generator)
        self.features = torch.randn(2, LENGTH, width, generator=generator)
        self.slots = (torch.randperm(2 * LENGTH, generator=generator) + 1).view(2, LENGTH)
        self.embed = tiny_embedding(model.config.hidden_size)

    def batch(self) -> Batch:
        none = torch.zeros(0, 64)
        return Batch(self.tokens, self.features, torch.zeros(2, LENGTH), none.long(), none, 2 * LENGTH)


class Serving:
    """Feeds the text piece by piece as an engine would."""

    def __init__(self, model: SpecBlock, text: Text) -> None:
        self.text, network = text, serving(model)
        pool = EntryPool(network, 2 * LENGTH + 1, sequences=2, live=8 * BLOCK)
        sizes = DraftingSizes(max_sequences=2, max_length=LENGTH, max_nodes=0)
        self.state = EntryState(sizes, pool, text.features.shape[2], torch.float32)
        self.forward = forward_of(network, text.embed, pool, self.state)
        self.end = torch.zeros(2, dtype=torch.int64)

    def commit(self, counts: list[int]) -> None:
        """So many further positions of each sequence."""
        wide = max(counts)
        places = (self.end[:, None] + torch.arange(wide)).clamp(max=LENGTH - 2)
        lines = torch.arange(2)[:, None]
        number = torch.tensor(counts)
        features, tokens = self.text.features[lines, places], self.text.tokens[lines, places + 1]
        self.state.wait(ROWS, self.end, number, self.text.slots[lines, places], features, tokens)
        self.end = self.end + number

    def first(self) -> tuple[Tensor, Live]:
        return self.forward.first(ROWS, self.state.take(ROWS, 8))


def assert_near(got: Tensor, expected: Tensor) -> None:
    """By the size of states, which those before the output norm have of their own."""
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-4 * expected.std().clamp(min=1.0)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"prefix_entries": "all"},
    {"shift": False},
    {"broadcast": False},
    {"num_layers": 1},
    {"num_layers": 3, "prefix_entries": "all"},
    dict(AUTHORS),
    *({"kind": kind, **trained_kind(kind).shape} for kind in TRAINED_KINDS if kind != "specblock"),
    {"kind": "eagle3", **trained_kind("eagle3").shape, "normalise_features": True, "continues_from": "normed"},
    {"kind": "eagle3", **trained_kind("eagle3").shape, "normed_residual": True},
    {"kind": "eagle3", **trained_kind("eagle3").shape, "normalise_features": True, "joined_norm": True},
    {"kind": "eagle3", **trained_kind("eagle3").shape, "num_layers": 2, "continues_from": "normed"},
    {"kind": "dflash", **trained_kind("dflash").shape, "silent_first": False, "mask_token": 5},
]
DEPTH = 4


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("family", OF_DRAFTERS)
def test_first_and_later_blocks(family: str, changes: dict[str, Any]) -> None:
    assert_equal_blocks(tiny_drafter(family, **({"block_size": BLOCK} | changes)))


def assert_equal_blocks(model: SpecBlock) -> None:
    """The first block and those behind it have the states of the training forward."""
    text = Text(model)
    feed = Serving(model, text)
    feed.commit([5, 7])
    feed.forward.ingest(ROWS, feed.state.take(ROWS, 8))
    feed.commit([1, 1])
    feed.first()
    feed.commit([3, 1])
    states, nodes = feed.first()

    anchors = (feed.end - 1)[:, None]
    training = training_forward_of(model, text.embed)
    _, expected = training.first(text.batch(), anchors)
    for own, other in zip(model.heads_and_context(states), (expected.states, expected.onward), strict=True):
        assert_near(own, other)

    depths = torch.zeros(2, 1, dtype=torch.int64)
    for further in range(1, min(DEPTH, model.config.blocks(DEPTH))):
        cuts = torch.tensor([[2 * further], [4]]).clamp(max=model.config.block_size)
        depths = depths + cuts
        picked = Picked(
            origin=StartNodes(depths, depths, torch.ones(2, 1)),
            tokens=text.tokens.gather(1, (anchors + 1 + depths).clamp(max=LENGTH - 1)),
            start=torch.zeros(2, 1, dtype=torch.int64),
            position=cuts - 1,
        )
        states, nodes = feed.forward.next(states, picked, nodes, feed.end)
        expected = training.next(text.batch(), expected, cuts)
        for own, other in zip(model.heads_and_context(states), (expected.states, expected.onward), strict=True):
            assert_near(own, other)


def test_a_text_that_has_only_begun() -> None:
    """Its anchor stands on nothing."""
    model = tiny_drafter(block_size=BLOCK)
    text = Text(model)
    feed = Serving(model, text)
    feed.commit([1, 2])
    states, _ = feed.first()
    _, expected = training_forward_of(model, text.embed).first(text.batch(), (feed.end - 1)[:, None])
    assert_near(states, expected.states)


def test_what_stands_further_back_than_was_trained_is_not_seen() -> None:
    """Without it a block is the same, with one entry less it is another."""
    model = tiny_drafter(block_size=BLOCK, num_layers=1, trained_length=6)
    text = Text(model)
    outcomes = []
    for number in (12, 6, 5):
        feed = Serving(model, text)
        feed.end += 12 - number
        feed.commit([number, number])
        outcomes.append(feed.first()[0])
    last = [states[:, :, -1] for states in outcomes]
    assert torch.equal(last[0], last[1])
    assert torch.equal(last[0], last[2])
    assert torch.equal(outcomes[0][:, :, 0], outcomes[1][:, :, 0])
    assert not torch.equal(outcomes[0][:, :, 0], outcomes[2][:, :, 0])


@pytest.mark.parametrize(("kind", "sees"), [("dflash", True), ("jetspec", False)])
def test_who_sees_later_entries_of_a_block(kind: str, sees: bool) -> None:
    """With fewer mask tokens behind it an entry's state is another where attention is two-way, and only there."""
    outcomes = []
    for size in (8, 5):
        model = tiny_drafter(kind=kind, **{**trained_kind(kind).shape, "block_size": size})
        feed = Serving(model, Text(model))
        feed.commit([6, 4])
        outcomes.append(feed.first()[0][:, :, :5])
    assert (float((outcomes[0] - outcomes[1]).abs().max()) > 1e-2) is sees


def test_queries_behind_an_entry_do_not_change_it_where_attention_is_causal() -> None:
    model = tiny_drafter(kind="treeflash", **trained_kind("treeflash").shape)
    outcomes = []
    for _ in range(2):
        feed = Serving(model, Text(model))
        feed.commit([6, 4])
        outcomes.append(feed.first()[0][:, :, 0])
        assert isinstance(model.input_layer, FusedInput)
        model.input_layer.position_queries[1:] += torch.randn(7, model.config.hidden_size)
    assert torch.equal(*outcomes)


def test_blocks_begun_together_do_not_see_each_other() -> None:
    model = tiny_drafter(block_size=BLOCK)
    feed = Serving(model, Text(model))
    feed.commit([6, 4])
    states, nodes = feed.first()
    together = _picked(starts=[0, 0, 0], positions=[1, 3, 0], tokens=[5, 6, 7])
    both, _ = feed.forward.next(states, together, nodes, feed.end)
    for place in range(3):
        again = Serving(model, feed.text)
        again.commit([6, 4])
        states, nodes = again.first()
        one = _picked([0], [[1, 3, 0][place]], [[5, 6, 7][place]])
        alone, _ = again.forward.next(states, one, nodes, again.end)
        assert_near(both[:, place : place + 1], alone)


def test_third_blocks_see_their_own_path_only() -> None:
    """A third block must not change when the second forward begins other blocks beside its parent's."""
    model = tiny_drafter(block_size=BLOCK)
    outcomes = []
    for starts, parent in (([1, 3], 1), ([3], 0)):
        feed = Serving(model, Text(model))
        feed.commit([6, 4])
        states, nodes = feed.first()
        second = _picked([0] * len(starts), starts, [5 + position for position in starts])
        states, nodes = feed.forward.next(states, second, nodes, feed.end)
        third = _picked([parent], [2], [9], depth=6)
        outcomes.append(feed.forward.next(states, third, nodes, feed.end)[0])
    assert_near(outcomes[0], outcomes[1])


def _picked(starts: list[int], positions: list[int], tokens: list[int], depth: int = 0) -> Picked:
    def both(values: list[int]) -> Tensor:
        return torch.tensor([values, values])

    depths = both([depth or position + 1 for position in positions])
    return Picked(StartNodes(depths, depths, torch.ones(depths.shape)), both(tokens), both(starts), both(positions))
