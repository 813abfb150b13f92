"""Tokens of logits as they are, where nobody's sampling changes a score; captured where forwards are.

Legend: rows = logits that choose a token, vocab = token ids.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels import ops
from kernels.graph_runner import Capture, GraphRunner
from kernels.sample import OFF, ChosenTokens, Filters


class Sampler:
    """Chooses by `kernels.ops`; `capture` takes logits that stand at the head of one static buffer, and the next choice
    overwrites the last one then."""

    def __init__(
        self, capture: Capture | None = None, logits: Tensor | None = None, counts: Iterable[int] = ()
    ) -> None:
        """`counts` are the numbers of rows to capture; what is chosen for more than are asked for nobody reads."""
        lines = [] if logits is None else [logits[:count] for count in sorted(counts, reverse=True)]
        self._likeliest = GraphRunner(_choose_likeliest, capture, (((), (line,)) for line in lines))
        self._plain, self._filtered = (
            GraphRunner(_sample, capture, [(_padding(line, filtered=filtered), (line,)) for line in lines])
            for filtered in (False, True)
        )

    def likeliest(self, logits: Tensor) -> ChosenTokens:
        """The likeliest token of each row. # logits [rows, vocab]"""
        return _leading(self._likeliest((), (logits,)), logits.shape[0])

    def sample(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters | None = None
    ) -> ChosenTokens:
        """Each row's token by position-keyed noise of what filters leave, as `kernels.ops`' `sample`."""
        runner = self._plain if filters is None else self._filtered
        return _leading(runner((seeds, positions, temperatures, filters or ()), (logits,)), logits.shape[0])


def _choose_likeliest(logits: Tensor) -> ChosenTokens:
    return ops.on(logits.device).choose_likeliest(logits)


def _sample(
    seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: tuple[Tensor, ...], logits: Tensor
) -> ChosenTokens:
    kept = Filters(*filters) if filters else None
    return ops.on(logits.device).sample(logits, seeds, positions, temperatures, kept)


def _padding(logits: Tensor, *, filtered: bool) -> tuple[Tensor | tuple[Tensor, ...], ...]:
    """Rows that are greedy: seeds, positions, temperatures, and filters that are off."""
    whole, zeros = (
        torch.zeros(3, logits.shape[0], dtype=torch.int64, device=logits.device),
        torch.zeros_like(logits[:, 0], dtype=torch.float32),
    )
    filters = Filters(zeros + OFF, whole[2], zeros.double() + 1) if filtered else ()
    return whole[0], whole[1], zeros, tuple(filters)


def _leading(choice: ChosenTokens, rows: int) -> ChosenTokens:
    """The leading rows, where there are others."""
    return choice if choice.tokens.shape[0] == rows else ChosenTokens(*(result[:rows] for result in choice))


EAGER_SAMPLER = Sampler()
