"""Captured block forwards draft what forwards draft that run as they are."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from drafters.network.recording import FeedbackRecorder
from drafters.protocol import DraftContext
from drafters.trained_kinds import trained_kind
from drafters.tree import Candidates
from kernels.graph_runner import Capture
from tests.drafters.network.parts import FedDrafter, target_config, tiny_drafter
from tests.kernels.tensor_program import kernels, record

LENGTH, TEXTS = 150, 3
TOLERANCE = 1e-5


def fed(capture: Capture | None, kind: str, blocks: int, *published: str) -> tuple[FedDrafter, FeedbackRecorder]:
    """A drafter of three sequences, and what it recorded of their first blocks."""
    target_config("llama")  # made once, with random numbers that the drafter's own must not depend on
    changes: dict[str, Any] = {**trained_kind(kind).shape, **dict.fromkeys(published, True)}
    model = tiny_drafter(trained_length=192, kind=kind, **changes)
    sizes: dict[str, Any] = {"max_sequences": TEXTS, "window_tokens": 8, "top": 2, "dtype": torch.float32}
    recorder = FeedbackRecorder(model.config, model.t2d, **sizes, wanted=lambda: False)
    recorder.captured = True
    sizes = {"sequences": TEXTS, "rows": TEXTS, "length": LENGTH, "max_nodes": 24}
    return FedDrafter(model, **sizes, capture=capture, blocks=blocks, starts=3, recorder=recorder), recorder


def story(feed: FedDrafter) -> list[Candidates]:
    """Drafts of one, two and three texts, with few and with many entries that wait, cold and warm."""
    for row, length in enumerate((20, 90, 60)):
        feed.drafter.start([DraftContext(row, feed.tokens[row, : length + 1].tolist())])
        feed.read(row, 0, length)
    drafts = []
    feed.commit([0, 1, 2], [20, 90, 60], 1)
    drafts.append(feed.grow([0, 1, 2], [21, 91, 61]))
    feed.commit([1], [91], 7)
    drafts.append(feed.grow([1], [98], temperature=1.0))
    feed.commit([0, 2], [21, 61], 3)
    drafts.append(feed.grow([2, 0], [64, 24]))
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
        ("eagle3", 2, "ranks_from_draft"),
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

    (eager, one_recorder), (captured, other_recorder) = fed(None, *form), fed(counted, *form)
    expected, found = story(eager), story(captured)
    assert calls >= len(found)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.parents, other.parents)
        torch.testing.assert_close(one.survival, other.survival, atol=TOLERANCE, rtol=0)
    assert other_recorder._blocks.roots[:TEXTS].tolist() == [24, 98, 64]
    for name in ("states", "logits"):
        kept, other_kept = (getattr(one._blocks, name)[:TEXTS] for one in (one_recorder, other_recorder))
        torch.testing.assert_close(kept, other_kept, atol=1e-4, rtol=0)
