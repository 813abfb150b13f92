"""A linear layer whose rows do not depend on their company: a row has the same bits alone and among any others.

    y = x W^T + b

Libraries pick their algorithm, and with it the order of a row's sum, by the number of rows; then a token that is
verified beside others can differ from one that is decoded alone. The device kernel sums every row in the order of its
columns. The idea, elsewhere called batch invariance, is that of "Defeating Nondeterminism in LLM Inference" (He et
al., 2025).

Legend: in, out = widths of the layer.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]
"""x [..., in] -> [..., out], in the type of both."""


def plan_linear(weight: Tensor, bias: Tensor | None) -> Product:
    """The product with one layer's weights: weight [out, in], bias [out] or none."""
    return partial(functional.linear, weight=weight, bias=bias)
