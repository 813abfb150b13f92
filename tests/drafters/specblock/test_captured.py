"""Replayed block forwards draft what forwards draft that run as they are."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drafters.protocol import Committed, DraftContext, Noise, Read
from drafters.specblock.blocks import TreeShape
from drafters.specblock.drafter import SpecBlockDrafter
from drafters.specblock.policies import best_first
from drafters.specblock.recording import NoRecorder
from drafters.tree import Candidates, DraftTree, VerifyResult
from kernels.graph_runner import Places, Replayed
from tests.drafters.specblock.parts import DRAFT_VOCAB, target_config, tiny_drafter, tiny_embedding
from tests.tiny_models import VOCAB_SIZE

torch.set_num_threads(1)
LENGTH, TEXTS = 150, 3
TOLERANCE = 1e-5


class Said(NoRecorder):
    """Keeps each row's last first block, and that of nobody's row."""

    def __init__(self, block: int, hidden: int) -> None:
        self.roots = torch.zeros(TEXTS + 1, dtype=torch.int64)
        self.states = torch.zeros(TEXTS + 1, block, hidden)
        self.logprobs = torch.zeros(TEXTS + 1, block, DRAFT_VOCAB)

    def grown(self, rows: Tensor, roots: Tensor, states: Tensor, logprobs: Tensor) -> None:
        for table, values in ((self.roots, roots), (self.states, states), (self.logprobs, logprobs)):
            table.index_copy_(0, rows, values)


class Texts:
    """Texts with made-up features, told to a drafter position by position."""

    def __init__(self, capture: Callable[[Callable[[], None]], Callable[[], None]] | None, blocks: int) -> None:
        target_config("llama")  # made once, with random numbers that the drafter's own must not depend on
        model = tiny_drafter(block_size=4, trained_length=192)
        generator = torch.Generator().manual_seed(5)
        width = len(model.config.tap_layers) * model.config.hidden_size
        self.tokens = torch.randint(VOCAB_SIZE, (TEXTS, LENGTH + 1), generator=generator)
        self.features = torch.randn(TEXTS, LENGTH, width, generator=generator)
        self.slots = torch.randperm(TEXTS * LENGTH, generator=generator).view(TEXTS, LENGTH) + 1
        self.said = Said(4, model.config.hidden_size)
        self.drafter = SpecBlockDrafter(
            model,
            tiny_embedding(model.config.hidden_size),
            shape=TreeShape(24, blocks=blocks, starts=3),
            policy=best_first,
            num_slots=TEXTS * LENGTH + 1,
            max_sequences=TEXTS,
            max_length=LENGTH,
            device="cpu",
            recorder=self.said,
            capture=capture,
        )

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


class OnADevice(TorchDispatchMode):
    """Refuses what a captured computation cannot do there: read a number, copy one from the host, size by values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert not str(func).startswith(("aten._local_scalar_dense", "aten.lift_fresh", "aten.nonzero")), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_same_trees(blocks: int) -> None:
    calls = 0

    def again(compute: Callable[[], None]) -> Callable[[], None]:
        compute()

        def replay() -> None:
            nonlocal calls
            calls += 1
            with OnADevice():  # type: ignore[no-untyped-call]
                compute()

        return replay

    as_they_are, replayed = Texts(None, blocks), Texts(again, blocks)
    expected, found = as_they_are.story(), replayed.story()
    assert calls >= len(found)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.parents, other.parents)
        torch.testing.assert_close(one.survival, other.survival, atol=TOLERANCE, rtol=0)
    assert replayed.said.roots[:TEXTS].tolist() == [24, 98, 64]
    for name in ("states", "logprobs"):
        said, again_said = (getattr(texts.said, name)[:TEXTS] for texts in (as_they_are, replayed))
        torch.testing.assert_close(said, again_said, atol=1e-4, rtol=0)


def test_a_function_whose_results_stay_where_they_are() -> None:
    values = torch.zeros(3)

    def doubled_and_shifted(count: int) -> tuple[Tensor, tuple[Tensor]]:
        return values[:count] * 2, (values[:count] + 1,)

    def again(compute: Callable[[], None]) -> Callable[[], None]:
        return compute

    places: Places[tuple[Tensor, tuple[Tensor]]] = Places()
    three, two = (Replayed(again, partial(doubled_and_shifted, count), places) for count in (3, 2))
    values.copy_(torch.arange(3.0))
    assert [part.tolist() for part in (three()[0], three()[1][0])] == [[0, 2, 4], [1, 2, 3]]
    values.add_(4)
    assert two()[0].tolist() == [8, 10]
    assert three.results[0].tolist() == [8, 10, 4]  # the same places
