"""Ways to choose tokens of logits as they are, where nobody's sampling changes a score: asked for, or replayed on the
buffers of replayed forwards. Same tokens either way.

Legend: rows = logits that choose a token, vocab = token ids.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from kernels import ops
from kernels.sample import Choice, choose_likeliest
from kernels.sample_filtered import OFF, Filters
from service.engine.graphs import Graphs


class Sampler(Protocol):
    """Tokens of one forward's logits."""

    def likeliest(self, logits: Tensor) -> Choice:
        """The likeliest token of each row. # logits [rows, vocab]"""
        ...

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Choice:
        """Each row's token by position-keyed noise, as `kernels.ops`' `sample`."""
        ...

    def sample_filtered(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters
    ) -> Choice:
        """The same of what filters leave, as `kernels.ops`' `sample_filtered`."""
        ...


class EagerSampler:
    """Kernel by kernel, of any logits."""

    def likeliest(self, logits: Tensor) -> Choice:
        return choose_likeliest(logits)

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Choice:
        return ops.on(logits.device).sample(logits, seeds, positions, temperatures)

    def sample_filtered(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters
    ) -> Choice:
        return ops.on(logits.device).sample_filtered(logits, seeds, positions, temperatures, filters)


EAGER_SAMPLER = EagerSampler()


class CapturedSampler:
    """Replays, of logits that stand at the head of one static buffer."""

    def __init__(self, graphs: Graphs, logits: Tensor, counts: Iterable[int]) -> None:
        """`counts` are the numbers of rows to capture; what is chosen for more than are asked for nobody reads."""
        most = logits.shape[0]
        seeds, positions, top_k, tokens = torch.zeros(4, most, dtype=torch.int64, device=logits.device)
        temperatures = torch.zeros(most, device=logits.device)
        top_p = torch.ones(most, dtype=torch.float64, device=logits.device)
        self._keys = (seeds, positions, temperatures)
        self._filters = Filters(torch.full_like(temperatures, OFF), top_k, top_p)
        self._choice = Choice(tokens, torch.zeros(most, dtype=torch.bool, device=logits.device))
        self._counts = sorted(counts)
        largest_first = self._counts[::-1]
        self._likeliest = {count: graphs.capture(self._sampling_likeliest(logits[:count])) for count in largest_first}
        self._sample = {count: graphs.capture(self._sampling(logits[:count])) for count in largest_first}
        self._filtered = {count: graphs.capture(self._filtering(logits[:count])) for count in largest_first}

    def likeliest(self, logits: Tensor) -> Choice:
        return self._replayed(self._likeliest, logits.shape[0])

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Choice:
        _fill(self._keys, (seeds, positions, temperatures))
        return self._replayed(self._sample, logits.shape[0])

    def sample_filtered(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters
    ) -> Choice:
        _fill((*self._keys, *self._filters), (seeds, positions, temperatures, *filters))
        return self._replayed(self._filtered, logits.shape[0])

    def _replayed(self, replays: dict[int, Callable[[], None]], rows: int) -> Choice:
        with torch.inference_mode():
            replays[next(count for count in self._counts if count >= rows)]()
        return Choice(*(result[:rows].clone() for result in self._choice))  # whoever learns reads them late

    def _sampling_likeliest(self, logits: Tensor) -> Callable[[], None]:
        return lambda: self._keep(EAGER_SAMPLER.likeliest(logits))

    def _sampling(self, logits: Tensor) -> Callable[[], None]:
        keys = [part[: logits.shape[0]] for part in self._keys]
        return lambda: self._keep(EAGER_SAMPLER.sample(logits, *keys))

    def _filtering(self, logits: Tensor) -> Callable[[], None]:
        seeds, positions, temperatures = (part[: logits.shape[0]] for part in self._keys)
        filters = Filters(*(part[: logits.shape[0]] for part in self._filters))
        return lambda: self._keep(EAGER_SAMPLER.sample_filtered(logits, seeds, positions, temperatures, filters))

    def _keep(self, choice: Choice) -> None:
        for place, found in zip(self._choice, choice, strict=True):
            place[: found.shape[0]].copy_(found)


@torch.inference_mode()
def _fill(places: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Put values at the head of static buffers."""
    for place, value in zip(places, values, strict=True):
        place[: value.shape[0]] = value
