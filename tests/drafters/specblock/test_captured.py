"""Captured block forwards draft what forwards draft that run as they are."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from drafters.feedback import FeedbackRecorder
from drafters.protocol import Committed, DraftContext, DraftingSizes, Noise, Read
from drafters.specblock.blocks import TrainedWeights
from drafters.specblock.drafter import SpecBlockDrafter
from drafters.specblock.recording import BlockRecorder
from drafters.trained_kinds import TRAINED_KINDS
from drafters.tree import Candidates, DraftTree, VerifyResult
from kernels.graph_runner import Capture
from tests.drafters.specblock.parts import serving, target_config, tiny_drafter, tiny_embedding
from tests.kernels.tensor_program import kernels, record
from tests.tiny_models import VOCAB_SIZE

torch.set_num_threads(1)
LENGTH, TEXTS = 150, 3
TOLERANCE = 1e-5


class Texts:
    """Texts with made-up features, told to a drafter position by position."""

    def __init__(self, capture: Capture | None, kind: str, blocks: int, *published: str) -> None:
        target_config("llama")  # made once, with random numbers that the drafter's own must not depend on
        changes: dict[str, Any] = {**TRAINED_KINDS[kind].shape, **dict.fromkeys(published, True)}
        model = tiny_drafter(trained_length=192, kind=kind, **changes)
        generator = torch.Generator().manual_seed(5)
        width = len(model.config.tap_layers) * model.config.hidden_size
        self.tokens = torch.randint(VOCAB_SIZE, (TEXTS, LENGTH + 1), generator=generator)
        self.features = torch.randn(TEXTS, LENGTH, width, generator=generator)
        self.slots = torch.randperm(TEXTS * LENGTH, generator=generator).view(TEXTS, LENGTH) + 1
        hidden = model.config.hidden_size
        tables = FeedbackRecorder(
            max_sequences=TEXTS, window_tokens=8, width=width, hidden=hidden, top=2, dtype=torch.float32, device="cpu"
        )
        self.said = BlockRecorder(tables, model.t2d, block_size=model.config.block_size, wanted=lambda: False)
        sizes = DraftingSizes(
            max_sequences=TEXTS, max_length=LENGTH, max_nodes=24, num_slots=TEXTS * LENGTH + 1, capture=capture
        )
        weights = TrainedWeights(serving(model), tiny_embedding(hidden), blocks=blocks, starts=3, recorder=self.said)
        self.drafter = SpecBlockDrafter(sizes, weights)

    def read(self, row: int, length: int) -> None:
        text: list[int] = self.tokens[row, : length + 1].tolist()
        self.drafter.start([DraftContext(row, text)])
        slots, features = self.slots[row, :length], self.features[row, :length]
        self.drafter.read(Read(row, 0, self.tokens[row, 1 : length + 1], slots, features))

    def commit(self, rows: list[int], positions: list[int], count: int) -> None:
        """So many tokens behind these positions were chosen."""
        at = torch.tensor(positions)[:, None] + torch.arange(count)
        lines = torch.tensor(rows)[:, None]
        nothing = torch.zeros(len(rows), 0, dtype=torch.int64)
        self.drafter.commit(
            Committed(
                rows=lines[:, 0],
                tokens=self.tokens[lines, at + 1],
                counts=torch.full((len(rows),), count),
                tree=DraftTree.empty(len(rows)),
                result=VerifyResult(nothing, nothing, nothing, nothing),
                features=self.features[lines, at],
                positions=at[:, 0],
                slots=self.slots[lines, at],
            )
        )

    def grow(self, rows: list[int], roots: list[int], temperature: float = 0.0) -> Candidates:
        line = torch.tensor(rows)
        noise = Noise(line + 3, torch.full((len(rows),), temperature), torch.tensor(roots))
        return self.drafter.grow(line, noise).take(torch.arange(len(rows)))

    def story(self) -> list[Candidates]:
        """Drafts of one, two and three texts, with few and with many entries that wait, cold and warm."""
        for row, length in enumerate((20, 90, 60)):
            self.read(row, length)
        drafts = []
        self.commit([0, 1, 2], [20, 90, 60], 1)
        drafts.append(self.grow([0, 1, 2], [21, 91, 61]))
        self.commit([1], [91], 7)
        drafts.append(self.grow([1], [98], temperature=1.0))
        self.commit([0, 2], [21, 61], 3)
        drafts.append(self.grow([2, 0], [64, 24]))
        return drafts


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with kernels():
        yield


@pytest.mark.parametrize(
    "form",
    [
        ("specblock", 1),
        ("specblock", 3),
        ("eagle3", 3),
        ("eagle3", 2, "token_beside", "ranks_from_draft"),
        ("medusa", 1),
        ("medusa", 1, "own_heads"),
        ("dflash", 1),
        ("jetspec", 1),
        ("treeflash", 3),
    ],
)
def test_the_same_trees(form: tuple[Any, ...]) -> None:
    calls = 0

    def counted(compute: Callable[[], None]) -> Callable[[], None]:
        repeat = record(compute)

        def call() -> None:
            nonlocal calls
            calls += 1
            repeat()

        return call

    eager, captured = Texts(None, *form), Texts(counted, *form)
    expected, found = eager.story(), captured.story()
    assert calls >= len(found)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.parents, other.parents)
        torch.testing.assert_close(one.survival, other.survival, atol=TOLERANCE, rtol=0)
    assert captured.said._roots[:TEXTS].tolist() == [24, 98, 64]
    for name in ("states", "logits"):
        said, captured_said = (getattr(texts.said, f"_{name}")[:TEXTS] for texts in (eager, captured))
        torch.testing.assert_close(said, captured_said, atol=1e-4, rtol=0)
