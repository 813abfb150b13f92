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
from service.engine.graphs import Graphs


class Choosing(Protocol):
    """Tokens of one forward's logits."""

    def likeliest(self, logits: Tensor) -> Choice:
        """The likeliest token of each row. # logits [rows, vocab]"""
        ...

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Choice:
        """Each row's token by position-keyed noise, as `kernels.ops`' `sample`."""
        ...


class Asked:
    """Kernel by kernel, of any logits."""

    def likeliest(self, logits: Tensor) -> Choice:
        return choose_likeliest(logits)

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Choice:
        return ops.on(logits.device).sample(logits, seeds, positions, temperatures)


ASKED = Asked()


class CapturedChoosing:
    """Replays, of logits that stand at the head of one static buffer."""

    def __init__(self, graphs: Graphs, logits: Tensor, counts: Iterable[int]) -> None:
        """`counts` are the numbers of rows to capture; what is chosen for more than are asked for nobody reads."""
        most = logits.shape[0]
        self._seeds, self._positions = torch.zeros(2, most, dtype=torch.int64, device=logits.device)
        self._temperatures = torch.zeros(most, device=logits.device)
        self._choice = Choice(torch.zeros_like(self._seeds), torch.zeros(most, dtype=torch.bool, device=logits.device))
        self._counts = sorted(counts)
        largest_first = self._counts[::-1]
        self._likeliest = {count: graphs.capture(self._choosing_likeliest(logits[:count])) for count in largest_first}
        self._sample = {count: graphs.capture(self._sampling(logits[:count])) for count in largest_first}

    def likeliest(self, logits: Tensor) -> Choice:
        return self._replayed(self._likeliest, logits.shape[0])

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Choice:
        rows = logits.shape[0]
        with torch.inference_mode():
            self._seeds[:rows] = seeds
            self._positions[:rows] = positions
            self._temperatures[:rows] = temperatures
        return self._replayed(self._sample, rows)

    def _replayed(self, replays: dict[int, Callable[[], None]], rows: int) -> Choice:
        with torch.inference_mode():
            replays[next(count for count in self._counts if count >= rows)]()
        return Choice(*(result[:rows].clone() for result in self._choice))  # whoever learns reads them late

    def _choosing_likeliest(self, logits: Tensor) -> Callable[[], None]:
        return lambda: self._keep(ASKED.likeliest(logits))

    def _sampling(self, logits: Tensor) -> Callable[[], None]:
        rows = slice(logits.shape[0])

        def compute() -> None:
            self._keep(ASKED.sample(logits, self._seeds[rows], self._positions[rows], self._temperatures[rows]))

        return compute

    def _keep(self, choice: Choice) -> None:
        for place, found in zip(self._choice, choice, strict=True):
            place[: found.shape[0]].copy_(found)
