"""A drafter around another: passes every call on, lets others listen, and can change the noise the inner one sees.

Knows neither what is drafted nor who listens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from drafters.protocol import Committed, DraftContext, Drafter, Noise, RankOutcomes, Read
from drafters.tree import Candidates


def _ignore(*heard: object) -> None:
    """Nobody listens."""


def _same(noise: Noise) -> Noise:
    return noise


class DrafterAround:
    """Behaves as `inner` does; listeners hear of a call after `inner` has answered it."""

    def __init__(
        self,
        inner: Drafter,
        *,
        noise: Callable[[Noise], Noise] = _same,
        started: Callable[[Sequence[DraftContext]], None] = _ignore,
        grown: Callable[[Tensor, Noise, Candidates], None] = _ignore,
        committed: Callable[[Committed], None] = _ignore,
        finished: Callable[[Sequence[int]], None] = _ignore,
    ) -> None:
        self._inner = inner
        self._noise = noise
        self._started = started
        self._grown = grown
        self._committed = committed
        self._finished = finished

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def version(self) -> int:
        return self._inner.version

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self._inner.tap_layers

    @property
    def wants_scores(self) -> bool:
        return self._inner.wants_scores

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    def start(self, contexts: Sequence[DraftContext]) -> None:
        self._inner.start(contexts)
        self._started(contexts)

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        noise = self._noise(noise)
        candidates = self._inner.grow(rows, noise)
        self._grown(rows, noise, candidates)
        return candidates

    def read(self, read: Read) -> None:
        self._inner.read(read)

    def commit(self, committed: Committed) -> None:
        self._inner.commit(committed)
        self._committed(committed)

    def finish(self, rows: Sequence[int]) -> list[int]:
        predicted = self._inner.finish(rows)
        self._finished(rows)
        return predicted

    def credits(self) -> Mapping[str, int]:
        return self._inner.credits()

    def rank_outcomes(self) -> RankOutcomes:
        return self._inner.rank_outcomes()

    def trainable(self) -> nn.Module | None:
        return self._inner.trainable()


def without_noise(inner: Drafter) -> Drafter:
    """The same drafter, kept from seeing the noise the target samples with: it drafts as at temperature 0."""

    def silent(noise: Noise) -> Noise:
        return replace(noise, temperatures=torch.zeros_like(noise.temperatures))

    return DrafterAround(inner, noise=silent)
