"""A linear layer whose rows do not depend on their company: a row has the same bits alone and among any others.

    y = x W^T + b

Libraries pick their algorithm, and with it the order of a row's sum, by the number of rows; then a token that is
verified beside others can differ from one that is decoded alone. The device kernel sums every row in the order of its
columns. The idea, elsewhere called batch invariance, is that of "Defeating Nondeterminism in LLM Inference" (He et
al., 2025).

Legend: in, out = widths of the layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]
"""x [..., in] -> [..., out], in the type of both."""


class QuantisedWeight(ABC):
    """A matrix [out, in] in blocks of a few bits (`kernels.quantised`)."""

    shape: tuple[int, int]
    dtype: torch.dtype  # of activations, and of its rows where they are looked up

    @classmethod
    @abstractmethod
    def joined(cls, weights: Sequence[Self]) -> Self:
        """Matrices of equal `in` and any forms, one below the other."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Of memory."""

    @abstractmethod
    def lookup(self, outputs: Tensor) -> Tensor:
        """Rows of the matrix. # outputs [...] int64 -> [..., in]"""

    @abstractmethod
    def plan(self, bias: Tensor | None) -> Product:
        """The product with this matrix. # bias [out]"""

    def dense(self) -> Tensor:
        """The whole matrix. # -> [out, in]"""
        return self.lookup(torch.arange(self.shape[0]))


Weight = Tensor | QuantisedWeight


def dense(weight: Weight) -> Tensor:
    """The matrix as a tensor. # -> [out, in]"""
    return weight.dense() if isinstance(weight, QuantisedWeight) else weight


def look_up(outputs: Tensor, weight: Weight) -> Tensor:
    """Rows of the matrix. # outputs [...] int64 -> [..., in]"""
    return weight.lookup(outputs) if isinstance(weight, QuantisedWeight) else functional.embedding(outputs, weight)


def even_sample(weight: Weight, count: int) -> Tensor:
    """Every n-th element, row after row, n such that there are at least `count`, or all. # -> [elements]"""
    if isinstance(weight, Tensor):
        return weight.detach().reshape(-1)[:: max(1, weight.numel() // count)]
    rows, columns = weight.shape
    places = torch.arange(0, rows * columns, max(1, rows * columns // count))
    return weight.lookup(places // columns).gather(1, (places % columns)[:, None])[:, 0]


def join(weights: Sequence[Weight]) -> Weight:
    """Matrices of equal `in`, one below the other; a tensor where some are tensors."""
    quantised = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
    if len(quantised) == len(weights):
        return type(quantised[0]).joined(quantised)
    return torch.cat([dense(weight) for weight in weights])


def plan_linear(weight: Weight, bias: Tensor | None) -> Product:
    """The product with one layer's weights: weight [out, in], bias [out] or none."""
    if isinstance(weight, QuantisedWeight):
        return weight.plan(bias)
    return partial(functional.linear, weight=weight, bias=bias)
