"""The forwards of serving, with pool, window and live rows, against those of training over the whole text at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.protocol import DraftingSizes
from drafters.specblock.growth import Origin, Picked
from drafters.specblock.model import SpecBlock
from drafters.specblock.pool import EntryPool, EntryState
from drafters.specblock.serving import BlockForward, Reach, Window
from drafters.training.corpus import Batch
from drafters.training.forward import TrainingForward
from tests.drafters.specblock.parts import tiny_drafter, tiny_embedding

torch.set_num_threads(1)
LENGTH, BLOCK = 24, 4
ROWS = torch.tensor([1, 0])


class Text:
    """Two sequences, what the target's layers said of them, and the slots they lie in."""

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
        self.model, self.text = model, text
        self.pool = EntryPool(model, 2 * LENGTH + 1, "cpu")
        sizes = DraftingSizes(max_sequences=2, max_length=LENGTH, max_nodes=0)
        self.state = EntryState(sizes, text.features.shape[2], torch.float32)
        self.end = torch.zeros(2, dtype=torch.int64)

    def commit(self, counts: list[int]) -> None:
        """So many further positions of each sequence."""
        wide = max(counts)
        places = (self.end[:, None] + torch.arange(wide)).clamp(max=LENGTH - 2)
        lines = torch.arange(2)[:, None]
        number = torch.tensor(counts)
        self.state.append(ROWS, self.end, number, self.text.slots[lines, places])
        self.state.wait(ROWS, number, self.text.features[lines, places], self.text.tokens[lines, places + 1])
        self.end = self.end + number

    def forward(self) -> BlockForward:
        positions, slots = self.state.window(ROWS, 32)
        return BlockForward(self.model, self.text.embed, self.pool, Window.of(positions, slots, self.pool))

    def first(self) -> tuple[BlockForward, Tensor, Reach]:
        waiting = self.state.take(ROWS, 8)
        forward = self.forward()
        return forward, forward.first(waiting), Reach.of_first(waiting.positions[:, -1], self.pool.entries)


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-4


VARIANTS: list[dict[str, Any]] = [
    {},
    {"prefix_entries": "all"},
    {"shift": False},
    {"broadcast": False},
    {"normalise_features": False},
    {"num_layers": 1},
    {"num_layers": 3, "prefix_entries": "all"},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_first_and_later_blocks(family: str, changes: dict[str, Any]) -> None:
    model = tiny_drafter(family, block_size=BLOCK, **changes)
    text = Text(model)
    serving = Serving(model, text)
    serving.commit([5, 7])
    serving.forward().ingest(serving.state.take(ROWS, 8))
    serving.commit([1, 1])
    serving.first()
    serving.commit([3, 1])
    forward, states, reach = serving.first()

    anchors = (serving.end - 1)[:, None]
    training = TrainingForward(model, text.embed)
    expected = training.first(text.batch(), anchors)
    assert_near(states[:, None], expected.states)

    cuts = torch.tensor([[2], [4]])
    start = anchors + 1 + cuts
    picked = Picked(
        origin=Origin(cuts, cuts, torch.ones(2, 1)),
        tokens=text.tokens.gather(1, start),
        start=torch.zeros(2, 1, dtype=torch.int64),
        position=cuts - 1,
    )
    reach = reach.onward(picked, BLOCK)
    later = forward.next(states[:, None], picked, reach, serving.end)
    assert_near(later, training.next(text.batch(), anchors, cuts, expected))


def test_blocks_begun_together_do_not_see_each_other() -> None:
    model = tiny_drafter(block_size=BLOCK)
    serving = Serving(model, Text(model))
    serving.commit([6, 4])
    forward, states, reach = serving.first()
    together = _picked(starts=[0, 0, 0], positions=[1, 3, 0], tokens=[5, 6, 7])
    states = states[:, None]
    both = forward.next(states, together, reach.onward(together, BLOCK), serving.end)
    for place in range(3):
        again = Serving(model, serving.text)
        again.commit([6, 4])
        forward, first, reach = again.first()
        one = _picked([0], [[1, 3, 0][place]], [[5, 6, 7][place]])
        alone = forward.next(first[:, None], one, reach.onward(one, BLOCK), again.end)
        assert_near(both[:, place : place + 1], alone)


def test_third_blocks_see_their_own_path_only() -> None:
    """A third block must not change when the second forward begins other blocks beside its parent's."""
    model = tiny_drafter(block_size=BLOCK)
    outcomes = []
    for starts, parent in (([1, 3], 1), ([3], 0)):
        serving = Serving(model, Text(model))
        serving.commit([6, 4])
        forward, states, reach = serving.first()
        second = _picked([0] * len(starts), starts, [5 + position for position in starts])
        reach = reach.onward(second, BLOCK)
        states = forward.next(states[:, None], second, reach, serving.end)
        third = _picked([parent], [2], [9], depth=6)
        outcomes.append(forward.next(states, third, reach.onward(third, BLOCK), serving.end))
    assert_near(outcomes[0], outcomes[1])


def _picked(starts: list[int], positions: list[int], tokens: list[int], depth: int = 0) -> Picked:
    def both(values: list[int]) -> Tensor:
        return torch.tensor([values, values])

    depths = both([depth or position + 1 for position in positions])
    return Picked(Origin(depths, depths, torch.ones(depths.shape)), both(tokens), both(starts), both(positions))
