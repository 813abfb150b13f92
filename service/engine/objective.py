"""What the budget maximises: how much one token of each sequence counts.

    throughput   every token counts the same
    latency      a token of a sequence that falls behind its pace counts more, up to four times

A pace is the seconds per token that a client is promised from its first token on: token n is due n times the pace
after the first. A sequence that has emitted n tokens in s seconds counts s / (n * pace), kept between 1 and 4.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

import torch
from torch import Tensor

from service.engine.sequence import Sequence

_MOST = 4.0


class Objective(Protocol):
    """Weights of the sequences that draft in a step."""

    def weights(self, sequences: Items[Sequence], device: torch.device) -> Tensor | None:
        """What one token of each counts; None where all count the same. # -> [sequences] float32"""
        ...


class Throughput:
    """Tokens per second, whose ever they are."""

    def weights(self, sequences: Items[Sequence], device: torch.device) -> Tensor | None:
        return None


class Latency:
    """Tokens per second, those of sequences behind their pace first."""

    def __init__(self, pace_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._pace_seconds = pace_seconds
        self._clock = clock

    def weights(self, sequences: Items[Sequence], device: torch.device) -> Tensor | None:
        now = self._clock()
        return torch.tensor([self._weight(sequence, now) for sequence in sequences], device=device)

    def _weight(self, sequence: Sequence, now: float) -> float:
        if sequence.first_token_seconds is None:
            return 1.0
        due = self._pace_seconds * max(1, sequence.num_generated)
        return min(_MOST, max(1.0, (now - sequence.first_token_seconds) / due))
