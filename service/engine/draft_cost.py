"""What a drafter's trees cost: seconds by number of sequences and blocks, measured at start-up, corrected online.

Measuring uses a drafter of its own on made-up text, so that the serving one learns nothing false from it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from drafters.protocol import DraftContext, Drafter, Known, Noise, Read
from service.engine.cost import FloatArray

_TEXT_TOKENS = 64
_RATE = 0.1
_LARGEST_SURPRISE = 4.0  # times what was expected: one hiccup must not pass for the price of drafting


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """Seconds of drafting one tree for each sequence of a batch."""

    blocks: FloatArray  # [block counts], rising
    batches: FloatArray  # [batch points], rising
    seconds: FloatArray  # [block counts, batch points]

    def draft_seconds(self, batch: int) -> float:
        """Of trees with all the blocks there are."""
        return float(np.interp(batch, self.batches, self.seconds[-1]))


FREE = DraftCosts(blocks=np.ones(1), batches=np.ones(1), seconds=np.zeros((1, 1)))
"""Of a drafter that was not measured."""


class OnlineDraftCosts:
    """Drafting seconds as they are now, by powers of two of the batch; starts from what was measured."""

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        self._seconds: dict[int, float] = {}

    def draft_seconds(self, batch: int) -> float:
        return self._seconds.get(batch.bit_length(), self._costs.draft_seconds(batch))

    def learn(self, batch: int, seconds: float) -> float:
        """Take in what drafting took; returns the same without what a hiccup added."""
        expected = self.draft_seconds(batch)
        likely = min(seconds, _LARGEST_SURPRISE * expected) if expected > 0 else seconds
        self._seconds[batch.bit_length()] = expected + _RATE * (likely - expected) if expected > 0 else likely
        return likely


def measure_drafts(
    make: Callable[[int], Drafter],
    *,
    blocks: Sequence[int],
    batches: Sequence[int],
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int = 3,
) -> DraftCosts:
    """Time trees of drafters that `make(blocks)` builds; each hears the same made-up text for every sequence."""
    tokens = torch.randint(vocab_size, (_TEXT_TOKENS,), generator=torch.Generator().manual_seed(0)).to(device)
    seconds = []
    for count in blocks:
        drafter = make(count)
        width = hidden_size * len(drafter.tap_layers)
        features = torch.zeros(_TEXT_TOKENS - 1, width, dtype=dtype, device=device)
        _tell(drafter, max(batches), tokens, features)
        seconds.append([min(_seconds(drafter, batch, device) for _ in range(1 + repeats)) for batch in batches])
    return DraftCosts(
        blocks=np.array(blocks, dtype=np.float64),
        batches=np.array(batches, dtype=np.float64),
        seconds=_monotonic(np.array(seconds)),
    )


def _monotonic(seconds: FloatArray) -> FloatArray:
    """Noise only adds, so nothing takes longer than more of it did."""
    for axis in range(2):
        seconds = np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis=axis), axis)
    return seconds


def _tell(drafter: Drafter, batch: int, tokens: torch.Tensor, features: torch.Tensor) -> None:
    text: list[int] = tokens.tolist()  # planned transfer: before serving
    drafter.start([DraftContext(row, text) for row in range(batch)])
    if drafter.tap_layers:
        slots = torch.arange(1, _TEXT_TOKENS, device=tokens.device)
        for row in range(batch):
            drafter.read(Read(row=row, start=0, tokens=tokens[1:], slots=slots, features=features))


def _seconds(drafter: Drafter, batch: int, device: torch.device) -> float:
    rows = torch.arange(batch, device=device)
    cold, roots = torch.zeros(batch, device=device), torch.full_like(rows, _TEXT_TOKENS - 1)
    known = Known(tuple(range(batch)), (_TEXT_TOKENS - 1,) * batch)
    noise = Noise(seeds=rows, temperatures=cold, positions=roots, warm=False, known=known)
    start = time.perf_counter()
    float(drafter.grow(rows, noise).survival.sum())  # planned transfer: waits for the device, before serving
    return time.perf_counter() - start
