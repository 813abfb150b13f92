"""Functions of tensors that stay where they are, made repeatable once and repeated in a few fixed shapes.

Knows neither what is computed nor how capturing works.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as nested

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Makes a computation on tensors that stay where they are repeatable; runs it at least once."""

BATCHES = (1, 2, 4, 8, 16, 32)
Result = TypeVar("Result")


class Places(Generic[Result]):
    """Where the results of one function stand in all its shapes: the leading part of those of the largest, which must
    be asked for first."""

    def __init__(self) -> None:
        self._largest: list[Tensor] = []

    def of(self, results: Result) -> Result:
        """Places for results like these. # tensors, also nested in tuples"""
        tensors, structure = nested.tree_flatten(results)
        self._largest = self._largest or [torch.zeros_like(tensor) for tensor in tensors]
        fitted = [place[tuple(map(slice, tensor.shape))] for place, tensor in zip(self._largest, tensors, strict=True)]
        places: Result = nested.tree_unflatten(fitted, structure)
        return places


class Replayed(Generic[Result]):
    """A function of tensors that stay where they are, and so do its results."""

    def __init__(self, capture: Capture, function: Callable[[], Result], places: Places[Result]) -> None:
        self.results = places.of(function())
        standing = nested.tree_leaves(self.results)

        def compute() -> None:
            for place, result in zip(standing, nested.tree_leaves(function()), strict=True):
                place.copy_(result)

        self._replay = capture(compute)

    def __call__(self) -> Result:
        """Results are overwritten by the next call, in whatever shape."""
        self._replay()
        return self.results


def batches_up_to(most: int) -> list[int]:
    """Of the shapes, the largest first."""
    return [most, *(batch for batch in reversed(BATCHES) if batch < most)]


def least(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest that holds so many. # sizes ascending"""
    return next((size for size in sizes if size >= wanted), None)
