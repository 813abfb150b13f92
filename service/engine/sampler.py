"""Tokens of logits as they are, where nobody's sampling changes a score; captured where forwards are.

Legend: rows = logits that choose a token, vocab = token ids.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels import ops
from kernels.graph_runner import Capture, GraphRunner
from kernels.sample import Choice, choose_likeliest
from kernels.sample_filtered import OFF, Filters


class Sampler:
    """Chooses by `kernels.ops`; `capture` takes logits that stand at the head of one static buffer."""

    def __init__(
        self, capture: Capture | None = None, logits: Tensor | None = None, counts: Iterable[int] = ()
    ) -> None:
        """`counts` are the numbers of rows to capture; what is chosen for more than are asked for nobody reads."""
        lines = [] if logits is None else [logits[:count] for count in sorted(counts, reverse=True)]
        self._likeliest = GraphRunner(choose_likeliest, capture, (((), (line,)) for line in lines))
        self._sample = GraphRunner(_sample, capture, ((_keys(line), (line,)) for line in lines))
        self._filtered = GraphRunner(
            _sample_filtered, capture, (((*_keys(line), tuple(_no_filters(line))), (line,)) for line in lines)
        )

    def likeliest(self, logits: Tensor) -> Choice:
        """The likeliest token of each row. # logits [rows, vocab]"""
        return _own(self._likeliest((), (logits,)), logits.shape[0])

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Choice:
        """Each row's token by position-keyed noise, as `kernels.ops`' `sample`."""
        return _own(self._sample((seeds, positions, temperatures), (logits,)), logits.shape[0])

    def sample_filtered(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters
    ) -> Choice:
        """The same of what filters leave, as `kernels.ops`' `sample_filtered`."""
        keys = (seeds, positions, temperatures, tuple(filters))
        return _own(self._filtered(keys, (logits,)), logits.shape[0])


def _sample(seeds: Tensor, positions: Tensor, temperatures: Tensor, logits: Tensor) -> Choice:
    return ops.on(logits.device).sample(logits, seeds, positions, temperatures)


def _sample_filtered(
    seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: tuple[Tensor, ...], logits: Tensor
) -> Choice:
    return ops.on(logits.device).sample_filtered(logits, seeds, positions, temperatures, Filters(*filters))


def _keys(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    seeds, positions = torch.zeros(2, logits.shape[0], dtype=torch.int64, device=logits.device)
    return seeds, positions, torch.zeros(logits.shape[0], device=logits.device)


def _no_filters(logits: Tensor) -> Filters:
    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full(logits.shape[:1], value, dtype=dtype, device=logits.device)

    return Filters(full(OFF, torch.float32), full(0, torch.int64), full(1.0, torch.float64))


def _own(choice: Choice, rows: int) -> Choice:
    """The leading rows, for whoever reads them after the next call."""
    return Choice(*(result[:rows].clone() for result in choice))


EAGER_SAMPLER = Sampler()
